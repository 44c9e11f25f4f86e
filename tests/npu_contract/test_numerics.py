"""Values of the kernels for NPU, with plain formulas behind the operators of torch_npu: equal to our references."""

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import mindspeed.ops as ops
from mindspeed.ops.fusion_attention import LANES, LANES_OF
from tests.npu_contract import attention_bodies, bodies
from tests.npu_contract.case import Case, Make
from tests.npu_contract.cases import CASES
from tests.npu_contract.recording import BACKWARD, FORWARD, OnNpu, OnReference, forward_and_backward

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
ALONE = [case for case in CASES if case.values and not case.group]


@pytest.fixture(scope="module", autouse=True)
def _npu() -> Iterator[None]:
    with bodies.installed(attention_bodies.BODIES), patch.dict(LANES_OF, cpu=LANES):
        yield


def cotangent(x: Tensor) -> Tensor:
    values = torch.randn(x.shape, generator=torch.Generator().manual_seed(x.numel()), dtype=torch.float64)
    return values.to(x.dtype)


def results(case: Case, dtype: torch.dtype, mode: Any) -> list[Tensor]:
    make = Make(dtype, "cpu")
    values, grads = forward_and_backward(case.call(make), make.leaves, cotangent, mode)
    return [*values, *grads, *make.written]


def assert_close(given: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    """Relative to the largest finite value, which statistics of hidden rows are not."""
    assert [x.dtype for x in given] == [x.dtype for x in expected]
    for a, b in zip(given, expected, strict=True):
        finite = b.detach().double().masked_fill(b.isinf(), 0)
        scale = max(1.0, float(finite.abs().max())) if b.numel() else 1.0
        torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize(("case", "dtype"), [pytest.param(c, t, id=f"{c}-{str(t)[6:]}") for c in ALONE for t in c.types])
def test_values_and_gradients_are_those_of_the_reference(case: Case, dtype: torch.dtype):
    mode = OnNpu()
    given = results(case, dtype, mode)
    assert mode.record.operators(FORWARD) == case.forward
    assert mode.record.operators(BACKWARD) == (case.backward or ())
    # statistics are fp32 sums of products of rounded numbers; all else has the type of its operands
    assert_close(
        given, results(case, dtype, OnReference()), tolerance=TOLERANCE[dtype] if case.operator != "quant_gmm" else 1e-2
    )


REFUSED: dict[str, Callable[[], Any]] = {
    "fp64": lambda: ops.rms_norm(torch.ones(2, 4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)),
    "a row without a dimension": lambda: ops.rms_norm(torch.ones(4), torch.ones(4)),
    "nine dimensions": lambda: ops.swiglu(torch.ones(2, 1, 1, 1, 1, 1, 1, 1, 1), 0),
    "a wide head": lambda: ops.npu_rotary_position_embedding(torch.ones(1, 1, 2, 896), *(torch.ones(1, 1, 2, 896),) * 2),
    "tables that repeat along the width of a batch": lambda: ops.npu_rotary_position_embedding(
        torch.ones(2, 3, 5, 8), torch.ones(1, 3, 5, 8), torch.ones(1, 3, 5, 8)
    ),
    "neighbours of a whole table": lambda: ops.npu_rotary_position_embedding(*(torch.ones(2, 3, 5, 8),) * 3, mode=1),
    "dropout of everything": lambda: ops.fusion_attention(*(torch.ones(1, 2, 3, 8),) * 3, 2, "BNSD", keep_prob=0.0)[:3],
    "values wider than keys": lambda: ops.fusion_attention(
        torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, 16), 2, "BNSD"
    )[:3],
    "a head of 769": lambda: ops.fusion_attention(*(torch.ones(1, 1, 2, 769),) * 3, 1, "BNSD")[:3],
    "a packed sequence without keys": lambda: ops.fusion_attention(
        *(torch.ones(4, 2, 8), torch.ones(2, 2, 8), torch.ones(2, 2, 8)),
        *(2, "TND"),
        actual_seq_qlen=[2, 4],
        actual_seq_kvlen=[2, 2],
    )[:3],
    "statistics of one lane": lambda: ops.npu_ring_attention_update(*(torch.ones(3, 2, 8), *(torch.ones(2, 4, 3, 1),) * 2) * 2),
    "tokens of fp32": lambda: ops.npu_fused_moe_token_permute(torch.ones(2, 4), torch.zeros(2, 1, dtype=torch.long)),
    "no rows": lambda: ops.npu_fused_moe_token_permute(
        torch.ones(2, 4, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.long), -2
    ),
    "fp32 probabilities": lambda: ops.npu_fused_moe_token_unpermute(
        torch.ones(2, 4, dtype=torch.bfloat16), torch.arange(2), torch.ones(2, 1)
    ),
    "no tokens": lambda: ops.npu_gmm(torch.ones(0, 4), torch.ones(2, 4, 3), group_list=[0, 0]),
    "a wide bias on fp16": lambda: ops.npu_gmm(
        torch.ones(2, 4).half(), torch.ones(1, 4, 3).half(), bias=torch.ones(1, 3), group_list=[2]
    ),
    "a gated activation": lambda: ops.ffn(
        *(torch.ones(4, 4).half(), torch.ones(4, 8).half(), torch.ones(4, 4).half()), "swiglu"
    ),
    "fp32 scales of bf16 results": lambda: ops.quant_gmm(
        torch.ones(2, 4, dtype=torch.int8), torch.ones(1, 4, 3, dtype=torch.int8), torch.ones(1, 3), group_list=[2]
    ),
    "an activation without scales of tokens": lambda: ops.quant_gmm(
        torch.ones(2, 4, dtype=torch.int8),
        torch.ones(1, 4, 3, dtype=torch.int8),
        torch.ones(1, 3, dtype=torch.bfloat16),
        group_list=[2],
        act_type=1,
    ),
    "operands of fp32": lambda: ops.npu_matmul_add_fp32(torch.ones(2, 4), torch.ones(2, 3), torch.ones(3, 4)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_npu_does_not_take_runs_the_reference(name: str, monkeypatch: pytest.MonkeyPatch):
    for module in ("npu_matmul_add_fp32", "lcal_coc"):  # these tensors, unlike those of an NPU, are on the CPU
        monkeypatch.setattr(import_module(f"mindspeed.ops.{module}"), "is_summed_wide", lambda a: False)
    mode = OnNpu()
    with mode:
        torch.manual_seed(5)
        given = REFUSED[name]()
    assert mode.record.called == []
    assert mode.record.ours
    with OnReference():
        torch.manual_seed(5)
        expected = REFUSED[name]()
    pairs = zip(*(r if isinstance(r, tuple) else (r,) for r in (given, expected)), strict=True)
    assert all(a is b is None or torch.equal(a, b) for a, b in pairs)
