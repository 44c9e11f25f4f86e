"""Training with up-projections in place beside Megatron's: layouts, precisions, queries with and without a latent vector."""

from typing import Any

import pytest

from tests.conftest import Prove
from tests.features.parity import BUCKETS, FULL, Given, cp, given, trains

NAME = "mla-split"
OFFLOADED: dict[str, Any] = {NAME: {"offload_output": True}}
ROLES = ["transformer-engine-layers"]
"""Layers that include norms, of which the local layers of the baseline have none."""
UP: dict[str, Any] = {"recompute": {"modules": ["mla_up_proj"]}}


def latent(*features: str, **world: Any) -> Given:
    return given(*features, multi_latent_attention=True, **world)


test_training_with_products_in_place_keeps_the_claim = trains(
    NAME,
    {
        "bf16": latent(nproc=1, dtype="bf16"),
        "plain queries": latent(nproc=1, q_lora_rank=0),
        "tensor parallel": latent("tensor-parallel", tp=2),
        "sequence parallel": latent("sequence-parallel", tp=2),
        "sequence parallel, bf16": latent("sequence-parallel", tp=2, dtype="bf16"),
        "sequence parallel, plain queries": latent("sequence-parallel", tp=2, q_lora_rank=0),
        "Transformer Engine's roles, sequence parallel": latent("sequence-parallel", "transformer-engine-layers", tp=2),
        "norms in linear layers": latent("sequence-parallel", also=ROLES, tp=2, qk_norm=True),
        "norms in linear layers, one process": latent(also=ROLES, nproc=1, qk_norm=True),
        "ring attention": latent("ring-attention", settings=cp(2), cp=2),
        "sequence and context parallel": latent("sequence-parallel", "ring-attention", settings=cp(2), tp=2, cp=2),
        "documents": latent("eod-reset", nproc=1),
        "one depth": latent(nproc=1, mtp_num_layers=1),
        "gathered weights": latent("sequence-parallel", *BUCKETS, tp=2, world_size=4),
        "gradients added to buffers": latent("matmul-add", nproc=1),
        "rotary operator": latent("rotary-embedding", nproc=1),
        "up-projections recomputed": latent("sequence-parallel", settings=UP, also=["recompute"], tp=2),
        "layers recomputed": latent("recompute", settings=FULL, nproc=1),
        "stages as a V": latent("dualpipev", pp=2),
        "offloaded output": latent(nproc=1, settings=OFFLOADED),
        "offloaded output, experts in pairs of passes": latent(
            "moe-fb-overlap", settings=OFFLOADED, ep=2, num_experts=4, ffn_hidden_size=32
        ),
        "offloaded output, norms and activations recomputed": latent(
            "norm-recompute", "activation-recompute", settings=OFFLOADED, nproc=1
        ),
        "offloaded output of flash attention, bf16": latent("flash-attention", settings=OFFLOADED, nproc=1, dtype="bf16"),
        "offloaded output, poisoned while away": latent(settings=OFFLOADED | {"device-emulation": {"poison": True}}, nproc=1),
        "offloaded output, stages as a V": latent("dualpipev", settings=OFFLOADED, pp=2),
        "offloaded output, up-projections recomputed": latent(
            "sequence-parallel", settings=OFFLOADED | UP, also=["recompute"], tp=2
        ),
    },
)


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "size"), [("fp32", 4), ("bf16", 2)])
def test_the_offloaded_output_is_in_host_memory_as_the_formula_has_it(prove: Prove, dtype: str, size: int) -> None:
    world = {"multi_latent_attention": True, "dtype": dtype}
    proof = prove(NAME, settings=OFFLOADED, world=world, nproc=1).proof
    assert proof.formula
    output = 4 * 24 * 4 * 10 * size  # layers, tokens, heads, width of a value
    without, offloaded = proof.bytes["saved activations"]
    assert (without - offloaded, proof.bytes["saved activations in host memory"]) == (output, (0, output))
