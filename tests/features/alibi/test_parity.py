"""The bias in the operator and across ranks, against Megatron's own core attention with the bias added to its scores."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import Prove

pytestmark = pytest.mark.long


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_operator_trains_as_megatrons_scores(prove: Prove, dtype: str) -> None:
    assert prove("alibi", world={"dtype": dtype}).problems == []


CASES: dict[str, tuple[list[str], dict[str, Any], dict[str, Any]]] = {
    "a matrix": ([], {"alibi": {"fused_type": 0}}, {}),
    "the root": ([], {"alibi": {"fused_type": 3}}, {}),
    "square, filled": ([], {"alibi": {"square": True, "fill": True}}, {}),
    "shared key heads": ([], {}, {"num_query_groups": 2}),
    "six heads": ([], {}, {"num_attention_heads": 6, "num_query_groups": 3, "hidden_size": 48}),
    "documents": (["eod-reset"], {}, {"micro_batch_size": 2}),
    "pipeline": (["pipeline-parallel"], {}, {}),
    "recomputed": (["recompute"], {"recompute": {"granularity": "full", "method": "uniform", "num_layers": 1}}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_form_does(prove: Prove, case: str) -> None:
    features, settings, world = CASES[case]
    assert prove("alibi", *features, settings=settings, world=world).problems == []


def test_tensor_parallel_ranks_have_the_slopes_of_their_heads(prove: Prove) -> None:
    world = {"num_attention_heads": 6, "num_query_groups": 2, "hidden_size": 48}
    assert prove("alibi", "tensor-parallel", "sequence-parallel", world=world).problems == []


def cp(size: int, **settings: Any) -> dict[str, dict[str, Any]]:
    return {"context-parallel": {"size": size}, **settings}


ALGORITHMS = ["ring-attention", "ulysses-attention", "kv-allgather-cp"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_share_of_the_sequence_trains_as_the_whole(prove: Prove, algorithm: str) -> None:
    assert prove("alibi", algorithm, settings=cp(2)).problems == []


@pytest.mark.parametrize("algorithm", ["ring-attention", "ulysses-attention", "kv-allgather-cp", "hybrid-attention"])
def test_four_ranks_do(prove: Prove, algorithm: str) -> None:
    more = {"hybrid-attention": {"ulysses_degree": 2}} if algorithm == "hybrid-attention" else {}
    assert prove("alibi", algorithm, settings=cp(4, **more)).problems == []


@pytest.mark.parametrize("algorithm", ["ring-attention", "ulysses-attention", "kv-allgather-cp"])
@pytest.mark.parametrize("other", ["tensor-parallel", "pipeline-parallel", "recompute", "eod-reset", "bf16"])
def test_they_do_beside_other_layouts(prove: Prove, algorithm: str, other: str) -> None:
    world = {"num_attention_heads": 12, "num_query_groups": 4, "hidden_size": 48}
    features = [] if other == "bf16" else [other]
    more = {"recompute": {"granularity": "full", "method": "uniform", "num_layers": 1}} if other == "recompute" else {}
    dtype = {"dtype": "bf16"} if other == "bf16" else {}
    assert prove("alibi", algorithm, *features, settings=cp(2, **more), world=world | dtype).problems == []
