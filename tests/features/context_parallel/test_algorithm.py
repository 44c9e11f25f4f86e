"""``context-parallel.algorithm``: a name, or auto, for worlds that need not exist."""

from typing import Any

import pytest

from mindspeed.context_parallel import costs
from mindspeed.plugins import UnknownValue, World
from tests.features.resolving import CATALOG, ask

MODEL = {
    "num_attention_heads": 64,
    "num_query_groups": 8,
    "hidden_size": 8192,
    "ffn_hidden_size": 8192,
    "vocab_size": 65536,
    "num_experts": 0,
    "seq_length": 131072,
    "dtype": "bf16",
}


def choices(algorithm: str = "auto", settings: dict[str, Any] | None = None, **world: Any) -> list[str]:
    given = {"context-parallel": {"algorithm": algorithm}} | (settings or {})
    resolution = ask(settings=given, model=MODEL, **world | {"world_size": 48 * 64})
    assert not resolution.problems, "\n".join(map(str, resolution.problems))
    rows = [row.text.removeprefix("context-parallel.algorithm is auto, so ") for row in resolution.rows if row.kind == "choice"]
    return [row for row in rows if not row.startswith("adaptive-cp: cannot, ")]  # it is for masks, which no plan knows


def winner(**world: Any) -> str:
    return choices(**world)[0].split()[0]


def test_a_name_is_enough():
    resolution = ask(settings={"context-parallel": {"size": 4, "algorithm": "ulysses-attention"}}, world_size=4)
    assert [(feature.name, feature.why[0].line) for feature in resolution.features] == [
        ("context-parallel", "context-parallel: the context-parallel size is 4"),
        ("ulysses-attention", "ulysses-attention: context-parallel.algorithm (command line) names it"),
    ]


def test_few_key_heads_and_few_ranks_are_for_a_ring_and_more_ranks_for_trading_heads():
    assert [winner(cp=ranks) for ranks in (2, 4, 8)] == ["ring-attention", "ring-attention", "ulysses-attention"]
    assert winner(cp=4, num_query_groups=64) == "ulysses-attention"


def test_inside_a_node_heads_are_traded_and_between_nodes_blocks_go_round():
    assert winner(cp=8, ranks_per_node=8) == "ulysses-attention"
    assert choices(cp=16, ranks_per_node=8) == [
        (
            "hybrid-attention is chosen, which costs least: a rank sends 662,700,032 bytes per layer and sequence, forward "
            "and backward, with ulysses_degree=8"
        ),
        "ring-attention: a rank sends 2,013,265,920 bytes per layer and sequence, forward and backward",
        (
            "ulysses-attention: a rank sends 629,145,600 bytes per layer and sequence, forward and backward, 335,544,320 of "
            "them between nodes and not overlapped with compute"
        ),
        (
            "kv-allgather-cp: a rank sends 2,013,265,920 bytes per layer and sequence, forward and backward, 1,073,741,824 "
            "of them between nodes and not overlapped with compute"
        ),
    ]


def test_tensor_parallel_ranks_share_the_node():
    assert "with ulysses_degree=4" in choices(cp=8, tp=2, ranks_per_node=8)[0]


def test_the_degree_of_the_neighbours_is_in_the_plan_and_what_the_user_said_stays():
    request = {"context-parallel": {"algorithm": "auto"}}
    features = ask(settings=request, model=MODEL, cp=16, ranks_per_node=8, world_size=16).features
    (hybrid,) = (feature for feature in features if feature.name == "hybrid-attention")
    assert (hybrid.settings["ulysses_degree"].value, hybrid.settings["ulysses_degree"].source) == (
        8,
        "context-parallel.algorithm=auto",
    )
    rows = choices(settings={"hybrid-attention": {"ulysses_degree": 2}}, cp=16, ranks_per_node=8)
    assert not any("ulysses_degree" in row for row in rows)


def test_what_cannot_says_why():
    assert [row for row in choices(cp=6, seq_length=6 * 1024) if "cannot" in row] == [
        "ulysses-attention: cannot, 64 attention heads are not divisible by cp x tp = 6 x 1"
    ]
    odd = choices(cp=4, seq_length=4 * 1023, num_query_groups=64)
    assert odd[0].startswith("ulysses-attention is chosen, which alone can: ")
    assert [row.split(": cannot, ")[1] for row in odd[1:]] == ["sequence length 4092 is not a multiple of 2 x cp = 2 x 4"] * 3


def test_without_the_shape_of_attention_nothing_is_decided():
    able = [name for name, spec in CATALOG.specs.items() if "context-parallel" in spec.slots]
    problems = ask(settings={"context-parallel": {"size": 2, "algorithm": "auto"}}, model={"seq_length": 64}).problems
    assert [f"{problem.code} {problem.message} | {problem.fix_text}" for problem in problems] == [
        (
            "MS341 context-parallel.algorithm is auto, but the choice needs values that are not set: num_attention_heads, "
            "num_query_groups, hidden_size, dtype | --num-attention-heads N --num-query-groups N --hidden-size N --dtype WORD, "
            f"or {', or '.join(f'--set context-parallel.algorithm={name}' for name in able)}"
        )
    ]


def test_one_rank_needs_no_algorithm():
    for algorithm in ("auto", "hybrid-attention"):
        settings = {"context-parallel": {"algorithm": algorithm}}
        assert [feature.name for feature in ask("context-parallel", settings=settings, world_size=1).features] == [
            "context-parallel"
        ]


@pytest.mark.parametrize(("ranks", "tp", "cp", "expected"), [(8, 1, 16, 8), (8, 2, 16, 4), (8, 8, 4, 1), (6, 1, 4, 2)])
def test_neighbours_of_a_node(ranks, tp, cp, expected):
    assert costs.near(World({"ranks_per_node": ranks, "tp": tp, "cp": cp})) == expected
    assert costs.near(World({"tp": tp, "cp": cp})) == cp


def test_all_that_is_not_known_is_said_at_once():
    with pytest.raises(UnknownValue) as caught:
        costs.attention_of(World({"cp": 2, "seq_length": 8}))
    assert caught.value.fields == ("num_attention_heads", "num_query_groups", "hidden_size", "dtype")
