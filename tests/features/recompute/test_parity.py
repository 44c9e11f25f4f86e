"""Recomputation against the same layout without it, with dropout, bit for bit."""

import pytest

from tests.conftest import Prove, differences
from tests.features.parity import Given, given, trains

pytestmark = pytest.mark.long

DISTRIBUTED = {"granularity": "full", "method": "uniform", "num_layers": 1, "distribute": True}
FULL = {"granularity": "full", "method": "uniform", "num_layers": 1}
BLOCK = {"granularity": "full", "method": "block", "num_layers": 1}
SELECTIVE = {"granularity": "selective"}
EXPERTS = {"granularity": "selective", "modules": ["moe"]}
LATENT = {"multi_latent_attention": True, "normalization": "RMSNorm"}


@pytest.mark.parametrize("settings", [FULL, BLOCK, SELECTIVE, EXPERTS], ids=["full", "block", "selective", "moe"])
def test_recomputed_activations_are_bit_equal(prove: Prove, settings: dict[str, object]) -> None:
    verdict = prove("recompute", settings={"recompute": settings})
    assert verdict.problems == []
    assert differences(verdict) == {0.0}
    without, recomputed = verdict.proof.bytes["saved activations"]
    assert recomputed < without


def layouts(name: str, settings: dict[str, object]) -> dict[str, Given]:
    chosen = {"recompute": settings}
    return {
        f"{name}, sequence parallel": given(also=["sequence-parallel"], settings=chosen),
        f"{name}, interleaved": given(also=["virtual-pipeline"], settings=chosen),
        f"{name}, bf16": given(settings=chosen, dtype="bf16"),
    }


test_recomputed_activations_are_bit_equal_in_a_layout = trains(
    "recompute",
    layouts("full", FULL)
    | layouts("selective", SELECTIVE)
    | {
        "MLPs beside the norm": given("rms-norm", settings={"recompute": {"modules": ["mlp"]}}),
        "experts that are spread": given("expert-parallel", settings={"recompute": {"modules": ["moe"]}}),
        "distributed inputs": given("tensor-parallel", settings={"recompute": DISTRIBUTED}, tp=2),
    },
)


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
