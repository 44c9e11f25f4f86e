"""Norms, activations and attention that leave, against the same layout without, with dropout: every bit, and the bytes."""

from typing import Any

import pytest

from tests.conftest import Prove, differences

pytestmark = pytest.mark.long

BLOCK = {"recompute": {"granularity": "full", "method": "block", "num_layers": 1}}
LLAMA = {"normalization": "RMSNorm", "gated_linear_unit": True, "activation": "silu", "num_query_groups": 2, "rotary": True}
POISON = {"device-emulation": {"poison": True}}
NORM, ACTIVATION, SWAP, REUSE, HOST, ADAPTIVE = (
    "norm-recompute",
    "activation-recompute",
    "swap-attention",
    "reuse-fp32-param",
    "swap-optimizer",
    "adaptive-recompute",
)
SIX = (NORM, ACTIVATION, SWAP, REUSE, HOST, ADAPTIVE)
PARTS = (NORM, ACTIVATION)
BF16 = {"dtype": "bf16"}


def exact(prove: Prove, *names: str, **request: Any) -> dict[str, tuple[int, int]]:
    """The bytes without and with features whose results are equal to the bit."""
    verdict = prove(*names, **request)
    assert verdict.problems == []
    assert differences(verdict) == {0.0}
    return verdict.proof.bytes


@pytest.mark.cover
@pytest.mark.parametrize("nproc", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", SIX)
def test_a_feature_is_bit_equal_and_keeps_the_bytes_of_its_formula(prove: Prove, name: str, dtype: str, nproc: int) -> None:
    if (name, dtype) == (REUSE, "fp32"):
        pytest.skip("fp32 weights have no residual of 16 bits, and are refused")
    also = ["distributed-optimizer"] if name in (REUSE, HOST) and nproc > 1 else []
    verdict = prove(name, also=also, world={"dtype": dtype}, nproc=nproc)
    assert verdict.problems == []
    assert differences(verdict) == {0.0}
    assert verdict.proof.formula


@pytest.mark.parametrize("name", SIX)
def test_nothing_reads_what_is_away(prove: Prove, name: str) -> None:
    world = BF16 if name in (REUSE, HOST) else {}
    exact(prove, name, settings=POISON, world=world, nproc=1)


@pytest.mark.cover
@pytest.mark.parametrize(
    ("names", "also", "settings", "world"),
    [
        (PARTS, ["sequence-parallel"], {}, {}),
        (PARTS, ["virtual-pipeline"], {}, {}),
        (PARTS, ["recompute"], BLOCK | {NORM: {"num_layers": 2}, ACTIVATION: {"num_layers": 3}}, {}),
        (PARTS, ["async-ddp", "matmul-add"], {}, BF16),
        (PARTS, ["rms-norm", "swiglu"], {}, LLAMA),
        (PARTS, ["expert-parallel"], {}, {}),
        (PARTS, ["moe-token-permute"], {}, {}),
        ((SWAP,), ["flash-attention"], {}, {}),
        ((SWAP,), ["ring-attention"], {}, {}),
        ((SWAP,), ["async-ddp", "matmul-add"], {}, BF16),
        ((SWAP,), ["virtual-pipeline"], {}, {}),
        ((SWAP,), ["pipeline-parallel"], {}, {}),
        ((SWAP,), ["sequence-parallel"], {}, {}),
        ((SWAP,), ["moe-token-permute"], {}, {}),
        ((SWAP,), ["norm-recompute", "activation-recompute"], {SWAP: {"modules": ["core_attention", "linear_proj"]}}, {}),
        ((REUSE, HOST), ["distributed-optimizer", "async-ddp", "async-param-gather"], {}, BF16),
        ((REUSE, HOST), ["pipeline-parallel"], {}, BF16 | {"tied_embeddings": True}),
        ((ADAPTIVE,), ["pipeline-parallel"], {}, {}),
        ((ADAPTIVE,), ["virtual-pipeline"], {}, {}),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list | tuple) else "",
)
def test_a_combination_is_bit_equal(
    prove: Prove, names: tuple[str, ...], also: list[str], settings: dict[str, Any], world: dict[str, Any]
) -> None:
    nproc = 2 if {"async-ddp", "async-param-gather"} & set(also) else None
    exact(prove, *names, also=also, settings=settings, world=world, nproc=nproc)


def test_a_baseline_with_fused_gradients_and_an_overlapped_reduction_in_a_pipeline_trains(prove: Prove) -> None:
    also = ["matmul-add", "async-ddp", "distributed-optimizer", "pipeline-parallel"]
    exact(prove, NORM, also=also, world=BF16, nproc=4)


@pytest.mark.parametrize("model", [{}, LLAMA], ids=["layernorm-gelu", "rmsnorm-swiglu"])
@pytest.mark.parametrize("name", PARTS)
def test_bf16_is_bit_equal(prove: Prove, name: str, model: dict[str, Any]) -> None:
    without, recomputed = exact(prove, name, world=BF16 | model)["saved activations"]
    assert recomputed < without
