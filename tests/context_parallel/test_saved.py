"""What layers keep with attention over ranks: the planner's bytes against those that a meter counts in a tiny model."""

from typing import Any

import pytest

from mindspeed.cli.memory_measure import accurate, compared
from mindspeed.context_parallel.costs import INPUTS
from mindspeed.engine.resolution.environment import made_up
from mindspeed.engine.resolution.request import Layer
from mindspeed.memory_planner.plans import stages_of
from mindspeed.registry import catalog, resolve
from mindspeed.workbench.verification.case import build_case
from mindspeed.workbench.verification.pool import WorkerPool

JOB = {
    "num_layers": 4,
    "hidden_size": 256,
    "ffn_hidden_size": 1024,
    "num_attention_heads": 8,
    "num_query_groups": 2,
    "num_experts": 0,
    "vocab_size": 1024,
    "seq_length": 4096,
    "micro_batch_size": 1,
    "global_batch_size": 8,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation": "silu",
    "rotary": True,
    "tied_embeddings": True,
    "dtype": "bf16",
}
ALGORITHMS = ("ring-attention", "ulysses-attention", "kv-allgather-cp", "adaptive-cp")


def activations(*names: str, **world: Any) -> int:
    layer = Layer("test", names, world=JOB | world)
    plan = resolve([layer], made_up("cpu", "0.16.1"))
    (stage,) = stages_of(plan, catalog())
    return stage.activations


@pytest.mark.parametrize("name", ALGORITHMS)
def test_two_ranks_keep_less_than_one(name: str) -> None:
    assert activations(name, cp=2, world_size=2) < activations(world_size=1)


def test_an_interval_counts_the_layers_that_keep_blocks() -> None:
    def rows(**settings: Any) -> list[tuple[str, int]]:
        layer = Layer("test", ("ring-attention",), {"ring-attention": settings}, JOB | {"cp": 2, "world_size": 2})
        plan = resolve([layer], made_up("cpu", "0.16.1"))
        (stage,) = stages_of(plan, catalog())
        return [(row.name, row.bytes) for row in stage.rows if row.name == INPUTS]

    tokens, head = 2048, 32 * 2
    inputs, keys = tokens * (2 * 8 + 3 * 2) * head, tokens * 2 * head
    assert rows() == [(INPUTS, 4 * inputs)]
    assert rows(keep="half") == [(INPUTS, 4 * (inputs + keys))]
    assert rows(keep="full", interval=1) == [(INPUTS, 2 * inputs), (INPUTS, 2 * (inputs + 2 * keys))]


GROUPED = {"rotary": True, "num_query_groups": 2}
LLAMA = GROUPED | {"dtype": "bf16", "normalization": "RMSNorm", "gated_linear_unit": True, "activation": "silu"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "settings", "world", "ranks"),
    [
        ("ring-attention", {"keep": "full"}, GROUPED, 2),
        ("ring-attention", {}, {}, 2),
        ("ring-attention", {}, LLAMA, 2),
        ("ring-attention", {"keep": "half"}, {"num_query_groups": 2}, 2),
        ("ulysses-attention", {}, {}, 2),
        ("ulysses-attention", {}, LLAMA, 2),
        ("ulysses-attention", {"keep": "full"}, GROUPED | {"num_query_groups": 1}, 2),
        ("ulysses-attention", {"keep": "half"}, {"num_query_groups": 1}, 2),
        ("kv-allgather-cp", {}, LLAMA, 2),
        ("adaptive-cp", {}, LLAMA, 2),
        ("hybrid-attention", {"ulysses_degree": 2}, GROUPED, 4),
    ],
)
def test_the_planner_counts_what_a_meter_counts(name: str, settings: dict[str, Any], world: dict[str, Any], ranks: int) -> None:
    """In new processes: the mask of causal blocks is made once in each."""
    layer = Layer("test", settings={name: settings}, world=world)
    case = build_case((name,), [layer], [], ranks, made_up("cpu", "0.16.1"))
    stages = stages_of(case.plan, catalog(), case.recipe.shape.dropout > 0)
    with WorkerPool() as pool:
        rows = compared(case, stages, pool.measure(case.plan, case.recipe, int(case.plan.world.world_size)))
    predicted, measured = rows["activations of a micro-batch"]
    assert predicted == pytest.approx(measured, rel=0.001)
    assert accurate(rows)
