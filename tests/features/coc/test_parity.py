"""Products in parts against one process, and against Megatron's sequence parallelism to the bit."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import Prove

pytestmark = pytest.mark.long
LLAMA = {"normalization": "RMSNorm", "gated_linear_unit": True, "activation": "silu", "num_query_groups": 2, "seq_length": 64}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_it_trains_as_one_process(prove: Prove, parts: int, dtype: str) -> None:
    settings = {"coc": {"parts": parts, "mode": 2}}
    verdict = prove("coc", "sequence-parallel", settings=settings, world={"dtype": dtype, **LLAMA})
    assert verdict.problems == []


@pytest.mark.parametrize(
    ("also", "world"),
    [
        (["pipeline-parallel"], {"pp": 2}),
        (["ulysses-attention"], {"cp": 2}),
        (["distributed-optimizer", "async-ddp", "async-param-gather"], {"world_size": 4}),
        (["matmul-add"], {}),
        (["expert-parallel"], {"ep": 2}),
        ([], {"mtp_num_layers": 1}),
    ],
    ids=str,
)
def test_it_composes(prove: Prove, also: list[str], world: dict[str, Any]) -> None:
    world = {"tp": 2, "seq_length": 64, **world}
    assert prove("coc", "sequence-parallel", *also, world=world).problems == []


@pytest.mark.parametrize(
    "settings", [{"granularity": "full", "method": "uniform", "num_layers": 1}, {"granularity": "selective"}]
)
def test_it_composes_with_recomputation(prove: Prove, settings: dict[str, Any]) -> None:
    world = {"tp": 2, "seq_length": 64}
    assert prove("coc", "sequence-parallel", "recompute", settings={"recompute": settings}, world=world).problems == []


def test_it_composes_with_multi_latent_attention(prove: Prove) -> None:
    """Against sequence parallelism: Megatron's own differs from one process there."""
    world = {"tp": 2, "seq_length": 64, "multi_latent_attention": True, "rotary": True}
    assert prove("coc", also=["sequence-parallel"], world=world).problems == []
