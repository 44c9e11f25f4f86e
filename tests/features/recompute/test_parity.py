"""Recomputation against the same layout without it, with dropout, bit for bit."""

from __future__ import annotations

import pytest

from tests.conftest import Prove, differences

pytestmark = pytest.mark.long

FULL = {"granularity": "full", "method": "uniform", "num_layers": 1}
BLOCK = {"granularity": "full", "method": "block", "num_layers": 1}
SELECTIVE = {"granularity": "selective"}
EXPERTS = {"granularity": "selective", "modules": ["moe"]}
LATENT = {"multi_latent_attention": True, "normalization": "RMSNorm"}
BOTH = pytest.mark.parametrize("settings", [FULL, SELECTIVE], ids=["full", "selective"])


@pytest.mark.parametrize("settings", [FULL, BLOCK, SELECTIVE, EXPERTS], ids=["full", "block", "selective", "moe"])
def test_recomputed_activations_are_bit_equal(prove: Prove, settings: dict[str, object]) -> None:
    verdict = prove("recompute", settings={"recompute": settings})
    assert verdict.problems == []
    assert differences(verdict) == {0.0}
    without, recomputed = verdict.proof.bytes["saved activations"]
    assert recomputed < without


@BOTH
@pytest.mark.parametrize("also", [["sequence-parallel"], ["virtual-pipeline"]], ids=lambda names: names[0])
def test_recomputed_activations_are_bit_equal_in_a_layout(prove: Prove, settings: dict[str, object], also: list[str]) -> None:
    assert prove("recompute", settings={"recompute": settings}, also=also).problems == []


@BOTH
def test_recomputed_activations_are_bit_equal_in_bf16(prove: Prove, settings: dict[str, object]) -> None:
    assert prove("recompute", settings={"recompute": settings}, world={"dtype": "bf16"}).problems == []


@pytest.mark.parametrize(
    ("modules", "world", "also"),
    [
        (["layernorm"], {"normalization": "RMSNorm"}, []),
        (["moe_act"], {"grouped_experts": True}, ["grouped-matmul-add"]),
        (["mla_up_proj"], LATENT, []),
        (["mlp"], {}, []),
    ],
    ids=["layernorm", "moe_act", "mla_up_proj", "mlp"],
)
def test_modules_of_transformer_engine_and_biases_are_bit_equal(
    prove: Prove, modules: list[str], world: dict[str, object], also: list[str]
) -> None:
    verdict = prove("recompute", settings={"recompute": {"modules": modules}}, world=world, also=also, nproc=1)
    assert verdict.problems == []
    without, recomputed = verdict.proof.bytes["saved activations"]
    assert recomputed < without
