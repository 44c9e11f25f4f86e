"""zero-bubble against Megatron: equal bits in the same layout with placement loop, one process's results with placement v."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mindspeed.engine.resolution.request import Layer
from mindspeed.plugins import Numerics
from mindspeed.verification.case import DROPOUT, build_case
from mindspeed.verification.harness import Verdict, verify
from mindspeed.verification.pool import WorkerPool
from tests.conftest import Prove

pytestmark = pytest.mark.long


def loop_verdict(pool: WorkerPool, pipeline: str, world: dict[str, Any], settings: dict[str, Any]) -> Verdict:
    """The verdict on equal bits in one layout, with dropout, which placement loop alone keeps."""
    layer = Layer("test", settings={"zero-bubble": settings}, world={"pp": 2, **world})
    case = build_case(["zero-bubble"], [layer], [pipeline], 2)
    recipe = replace(case.recipe, shape=replace(case.recipe.shape, dropout=DROPOUT))
    assert case.baseline.world.pp == 2
    return verify(replace(case, numerics=Numerics.exact(), recipe=recipe), pool)


@pytest.mark.parametrize(
    ("pipeline", "world", "settings"),
    [
        ("virtual-pipeline", {"vpp": 2}, {"costs": [10, 13, 8, 10], "hop": 2}),
        ("virtual-pipeline", {"vpp": 2, "global_batch_size": 16}, {"recompute": "least", "limit": 3}),
        ("pipeline-parallel", {"dtype": "bf16"}, {"recompute": "all", "output_layer": True}),
        ("virtual-pipeline", {"vpp": 2}, {"costs": "measured"}),
    ],
)
def test_searched_schedules_are_megatrons(
    pool: WorkerPool, pipeline: str, world: dict[str, Any], settings: dict[str, Any]
) -> None:
    assert loop_verdict(pool, pipeline, world, settings).problems == []


V = {"zero-bubble": {"placement": "v"}}


@pytest.mark.parametrize(
    ("also", "world", "settings"),
    [
        ([], {}, {}),
        ([], {"global_batch_size": 4}, {}),
        ([], {"dtype": "bf16"}, {}),
        ([], {}, {"recompute": "all", "costs": "measured"}),
        (["moe-token-permute"], {}, {}),
        (["matmul-add"], {"dtype": "bf16"}, {"output_layer": True}),
    ],
)
def test_stages_placed_as_a_v_train_as_one_process(
    prove: Prove, also: list[str], world: dict[str, Any], settings: dict[str, Any]
) -> None:
    settings = {"zero-bubble": {"placement": "v", **settings}}
    assert prove("zero-bubble", also=also, settings=settings, world={"pp": 2, "vpp": 2, **world}, nproc=2).problems == []


@pytest.mark.parametrize(
    ("features", "world"),
    [
        ([], {"pp": 4}),
        (["sequence-parallel"], {"tp": 2}),
        (["distributed-optimizer", "async-ddp", "async-param-gather"], {}),
        (["ring-attention"], {"cp": 2}),
    ],
)
def test_a_v_on_four_ranks_trains_as_one_process(prove: Prove, features: list[str], world: dict[str, Any]) -> None:
    world = {"pp": 2, "vpp": 2, "num_layers": 8, **world}
    assert prove("zero-bubble", *features, settings=V, world=world, nproc=4).problems == []
