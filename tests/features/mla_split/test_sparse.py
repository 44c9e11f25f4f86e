"""Sparse attention over latent vectors: training beside Megatron's attention to keys and values of heads."""

from typing import Any

import pytest

from tests.conftest import Prove
from tests.features.parity import BUCKETS, FULL, Given, given, trains

NAME = "mla-split"
ABSORBED: dict[str, Any] = {NAME: {"absorb": True}}
ROLES = ["transformer-engine-layers"]
"""Layers for which alone Megatron has sparse attention."""


def sparse(*features: str, settings: Any = None, also: Any = (), topk: int = 5, **world: Any) -> Given:
    """Return a case of a model of 24 tokens whose queries have ``topk`` keys."""
    model = {"multi_latent_attention": True, "indexer_topk": topk}
    return given(*features, also=[*ROLES, *also], settings=ABSORBED | (settings or {}), **model, **world)


def test_attention_to_latent_vectors_is_that_to_keys_of_heads(prove: Prove) -> None:
    case = sparse(nproc=1)
    verdict = prove(NAME, also=case.also, settings=case.settings, world=case.world, nproc=1)
    assert not verdict.problems, verdict.problems


UP: dict[str, Any] = {"recompute": {"modules": ["mla_up_proj"]}}
ALL = 24
"""Every key. In bf16, rounding decides between keys of similar scores, so that two runs select other keys of fewer."""
TENSOR, ROWS, STAGES = ["tensor-parallel"], ["sequence-parallel"], ["pipeline-parallel"]
"""Layouts of both runs: Megatron adds up the indexer's losses of micro-batches, so they count less with data parallelism."""

test_training_with_absorbed_projections_keeps_the_claim = trains(
    NAME,
    {
        "bf16": sparse(nproc=1, dtype="bf16", topk=ALL),
        "every key selected": sparse(nproc=1, topk=ALL),
        "more keys than tokens": sparse(nproc=1, topk=100),
        "odd length": sparse(nproc=1, seq_length=23),
        "plain queries": sparse(nproc=1, q_lora_rank=0),
        "norms of latent vectors": sparse(nproc=1, qk_norm=True),
        "two samples": sparse(nproc=1, micro_batch_size=2),
        "tensor parallel": sparse(also=TENSOR, tp=2),
        "sequence parallel": sparse(also=ROWS, tp=2),
        "sequence parallel, bf16": sparse(also=ROWS, tp=2, dtype="bf16", topk=ALL),
        "sequence parallel, norms of latent vectors": sparse(also=ROWS, tp=2, qk_norm=True),
        "gathered weights": sparse(*BUCKETS, also=ROWS, tp=2, world_size=4),
        "gradients added to buffers": sparse("matmul-add", nproc=1),
        "gradients added to buffers, bf16": sparse("matmul-add", nproc=1, dtype="bf16", topk=ALL),
        "one depth": sparse(nproc=1, mtp_num_layers=1),
        "up-projections recomputed": sparse(settings=UP, also=[*ROWS, "recompute"], tp=2),
        "layers recomputed": sparse("recompute", settings=FULL, nproc=1),
        "stages": sparse(also=STAGES, pp=2),
        "interleaved stages": sparse(also=["virtual-pipeline"], pp=2, vpp=2),
        "stages and sequence parallel": sparse(also=[*STAGES, *ROWS], pp=2, tp=2),
        "experts in pairs of passes": sparse(also=["moe-fb-overlap"], ep=2, num_experts=4, ffn_hidden_size=32),
        "operators": sparse("rms-norm", "swiglu", "rotary-embedding", nproc=1),
        "offloaded output": sparse(nproc=1, settings={NAME: {"absorb": True, "offload_output": True}}),
    },
)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("topk", [5, ALL])
def test_sparse_attention_keeps_what_the_formula_has(prove: Prove, dtype: str, topk: int) -> None:
    case = sparse(nproc=1, dtype=dtype, topk=topk)
    proof = prove(NAME, also=case.also, settings=case.settings, world=case.world, nproc=1, steps=1).proof
    assert proof.formula["saved activations"] == pytest.approx(proof.bytes["saved activations"], rel=0.01)
