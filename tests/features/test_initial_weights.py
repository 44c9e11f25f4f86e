"""No feature changes the initial weights: from the same seed a model begins as it does without the feature."""

from dataclasses import replace

import pytest

import mindspeed
from mindspeed import registry
from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.job.world import PARALLEL_SIZES
from mindspeed.plugins import MindSpeedError
from mindspeed.plugins.discovery import discover
from mindspeed.workbench.verification.case import VerificationCase, build_case
from mindspeed.workbench.verification.pool import WorkerPool
from tests.features.initial_weights import initial_weights

GROUPED = ("moe-adaptive-recompute", "moe-grouped-gemm", "moe-zero-memory")
"""Features that exchange Megatron's single experts for grouped ones, whose weights could be drawn in another order."""
OTHER_MODELS = ("alibi", "dualpipev", "moe-shared-experts", "tensor-parallel-2d")
"""Features with other parameters on a rank than the same job without them; each has a test of its own."""
NAMES = [
    name if name in GROUPED else pytest.param(name, marks=pytest.mark.long)
    for name in sorted({*discover(only=()).usable}.difference(OTHER_MODELS))
]


def without(name: str, case: VerificationCase, **more: object) -> ActivationPlan:
    """Megatron's own plan in the layout of a case: the features that own parallel sizes, but not the one under test."""
    known, world = registry.catalog(), case.plan.world.known()
    sizes = {size: world[size] for size in (*PARALLEL_SIZES, "world_size") if size in world}
    names = [f.name for f in case.plan.features if f.name != name and known.specs[f.name].sizes]
    left_out = {name, *known.level_one}.difference(names)
    return mindspeed.plan(names, world=case.recipe.world() | sizes | more, without=sorted(left_out), platform="cpu")


@pytest.mark.parametrize("name", NAMES)
def test_a_model_begins_with_the_weights_of_megatron(name: str, pool: WorkerPool) -> None:
    try:
        case = build_case([name])
        plans = case.plan, without(name, case)
    except MindSpeedError as error:
        pytest.skip(f"it has no layout that is also one without it: {error.problems[0].message}")
    ranks = int(case.plan.world.world_size)
    after, before = (pool.call(initial_weights, ranks, case.recipe, plan=plan) for plan in plans)
    assert [sorted(rank) for rank in after] == [sorted(rank) for rank in before]
    assert after == before


@pytest.mark.long
def test_alibi_leaves_out_the_position_embeddings_and_changes_no_other_weight(pool: WorkerPool) -> None:
    case = build_case(["alibi"])
    (after,), (before,) = (pool.call(initial_weights, 1, case.recipe, plan=p) for p in (case.plan, without("alibi", case)))
    positions = {key for key in before if key.startswith("embedding.position_embeddings.weight ")}
    assert len(positions) == 1
    assert after == {key: value for key, value in before.items() if key not in positions}


@pytest.mark.long
def test_shared_experts_begin_as_those_of_megatron(pool: WorkerPool) -> None:
    case = build_case(["moe-shared-experts"])
    width = case.recipe.shape.ffn_hidden_size  # of one expert
    shape = replace(case.recipe.shape, shared_expert_hidden_size=width)
    own = without("moe-shared-experts", case, shared_expert_hidden_size=width)
    after = pool.call(initial_weights, 2, case.recipe, plan=case.plan)
    before = pool.call(initial_weights, 2, replace(case.recipe, shape=shape), plan=own)
    assert [sum("shared_experts" in key for key in rank) for rank in before] == [12, 12]
    assert after == before


@pytest.mark.long
def test_ranks_that_hold_the_layers_of_a_v_draw_what_they_draw_for_those_of_megatron(pool: WorkerPool) -> None:
    case = build_case(["dualpipev"])
    after, before = (pool.call(initial_weights, 2, case.recipe, plan=plan) for plan in (case.plan, without("dualpipev", case)))
    assert {key for rank in after for key in rank} == {key for rank in before for key in rank}
    layers = [[{value for key, value in rank.items() if ".linear_" in key} for rank in ranks] for ranks in (after, before)]
    assert layers[0] == layers[1]


@pytest.mark.long
def test_tiles_of_two_dimensions_are_drawn_once_each_and_no_other_weight_changes(pool: WorkerPool) -> None:
    """A tile has another shape than a share of tensor parallelism, so its values are others, as those of another tp are."""
    case = build_case(["tensor-parallel-2d"])
    plans = case.plan, without("tensor-parallel-2d", case)
    after, before = (pool.call(initial_weights, 2, case.recipe, plan=plan) for plan in plans)
    tiles = [{key: rank[key] for key in rank.keys() - other.keys()} for rank, other in zip(after, before, strict=True)]
    kept = [{key: rank[key] for key in rank.keys() - cut} for rank, cut in zip(after, tiles, strict=True)]
    assert all(rank.items() <= other.items() for rank, other in zip(kept, before, strict=True))
    names = {key.partition(" ")[0].rpartition("layers.")[2].partition(".")[2] for tile in tiles for key in tile}
    linear = {
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
        "self_attention.linear_proj.weight",
        "self_attention.linear_qkv.weight",
    }
    assert names == linear
    assert not tiles[0].keys() & tiles[1].keys()
    drawn = [value for tile in tiles for value, _ in tile.values()]
    assert len(set(drawn)) == len(drawn) == 2 * 4 * len(linear)
