from __future__ import annotations

import pytest

from tests.features.resolving import active, overrides, refusals

ALGORITHMS = ["ring-attention", "ulysses-attention", "kv-allgather-cp"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_algorithm_brings_the_group_along(algorithm):
    assert active(algorithm, cp=2, world_size=2) == ["context-parallel", algorithm]


def test_a_group_needs_an_algorithm():
    (problem,) = refusals("context-parallel", cp=2)
    assert "attention has to look beyond the tokens of a rank: name ring-attention, ulysses-attention or another" in problem


def test_two_algorithms_at_once_are_a_conflict():
    problems = refusals("ring-attention", "ulysses-attention", cp=2)
    assert any("take out ring-attention or take out ulysses-attention" in problem for problem in problems)


def test_the_loss_is_divided_by_tokens():
    assert overrides("context-parallel", size=2) == {"context_parallel_size": 2, "calculate_per_token_loss": True}
    assert overrides("context-parallel", size=1) == {"context_parallel_size": 1}


@pytest.mark.parametrize("algorithm", ["ring-attention", "kv-allgather-cp"])
def test_zigzag_needs_two_pieces_for_each_rank(algorithm):
    assert refusals(algorithm, cp=4, seq_length=60) == [
        f"MS304 {algorithm}: sequence length 60 is not a multiple of 2 x cp = 2 x 4 "
        "| use a --seq-length that is a multiple of 2 x 4"
    ]


def test_heads_divide_among_ranks_that_trade_them():
    assert refusals("ulysses-attention", cp=4, tp=2) == []
    assert refusals("ulysses-attention", cp=4, num_attention_heads=6, num_query_groups=2) == [
        "MS304 ulysses-attention: 6 attention heads do not divide among cp x tp = 4 x 1 ranks "
        "| a smaller --cp, or ring-attention, which needs nothing of the heads"
    ]


def test_a_window_divides_the_ring():
    assert refusals("ring-attention", cp=4, settings={"ring-attention": {"window": 3}}) == [
        "MS304 ring-attention: window 3 does not divide the context-parallel size 4 | --set ring-attention.window=1"
    ]


def test_a_hybrid_has_neighbours_and_a_ring():
    two = {"hybrid-attention": {"ulysses_degree": 2}}
    assert refusals("hybrid-attention", cp=4, settings=two) == []
    assert refusals("hybrid-attention", cp=2, settings=two) == [
        "MS304 hybrid-attention: 2 neighbours and a ring of two or more do not make 2 context-parallel ranks "
        "| a --cp that is two or more times 2, or ulysses-attention or ring-attention alone"
    ]
    (problem,) = refusals("hybrid-attention", cp=4, settings={"hybrid-attention": {"ulysses_degree": 1}})
    assert "ulysses_degree" in problem
    settings = {"hybrid-attention": {"ulysses_degree": 2, "window": 3}}
    assert any("window 3 is not a part of the ring" in text for text in refusals("hybrid-attention", cp=8, settings=settings))


@pytest.mark.parametrize("algorithm", ["ulysses-attention", "hybrid-attention", "adaptive-cp"])
def test_further_tokens_are_predicted_in_a_zigzag_only(algorithm):
    settings = {"hybrid-attention": {"ulysses_degree": 2}} if algorithm == "hybrid-attention" else {}
    sentence = "multi-token prediction looks for the next tokens where Megatron's zig-zag has them, and here they are elsewhere"
    problem = f"MS304 {algorithm}: {sentence} | ring-attention or kv-allgather-cp, or no --mtp-num-layers"
    assert problem in refusals(algorithm, cp=4, mtp_num_layers=1, settings=settings)
    assert problem not in refusals(algorithm, cp=4, mtp_num_layers=0, settings=settings)
    assert problem not in refusals(algorithm, cp=1, mtp_num_layers=1, settings=settings)


@pytest.mark.parametrize("algorithm", ["ring-attention", "kv-allgather-cp"])
def test_a_zigzag_has_the_next_tokens_where_they_are_looked_for(algorithm):
    assert refusals(algorithm, cp=2, mtp_num_layers=1) == []
