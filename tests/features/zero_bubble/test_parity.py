"""zero-bubble against Megatron: equal bits in the same layout with placement loop, one process's results with placement v."""

from dataclasses import replace
from typing import Any

import pytest

from mindspeed.engine.resolution.request import Layer
from mindspeed.plugins import Numerics
from mindspeed.workbench.verification.case import DROPOUT, build_case
from mindspeed.workbench.verification.harness import Verdict, verify
from mindspeed.workbench.verification.pool import WorkerPool
from tests.features.parity import BUCKETS, Given, given, trains

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
        ("virtual-pipeline", {"vpp": 2}, {"costs": [10, 20, 7, 10], "hop": 1}),
        ("pipeline-parallel", {"global_batch_size": 12}, {"costs": [10, 20, 7, 10], "output_layer": True}),
        ("virtual-pipeline", {"vpp": 2, "global_batch_size": 16}, {"recompute": "least", "limit": 3}),
        ("pipeline-parallel", {"dtype": "bf16"}, {"recompute": "all", "output_layer": True}),
        ("virtual-pipeline", {"vpp": 2}, {"costs": "measured"}),
    ],
)
def test_searched_schedules_are_megatrons(
    pool: WorkerPool, pipeline: str, world: dict[str, Any], settings: dict[str, Any]
) -> None:
    assert loop_verdict(pool, pipeline, world, settings).problems == []


def v(*features: str, also: tuple[str, ...] = (), nproc: int = 2, own: Any = None, **world: Any) -> Given:
    settings = {"zero-bubble": {"placement": "v", **(own or {})}}
    return given(*features, also=also, settings=settings, nproc=nproc, **{"pp": 2, "vpp": 2, **world})


test_stages_placed_as_a_v_train_as_one_process = trains(
    "zero-bubble",
    {
        "stages": v(),
        "few micro-batches": v(global_batch_size=4),
        "searched": v(own={"costs": [10, 20, 7, 10], "hop": 1}),
        "bf16": v(dtype="bf16"),
        "recomputed, costs measured": v(own={"recompute": "all", "costs": "measured"}),
        "experts": v(also=("moe-token-permute",)),
        "matmul-add in bf16": v(also=("matmul-add",), own={"output_layer": True}, dtype="bf16"),
        "four stages": v(nproc=4, pp=4, num_layers=8),
        "sequence parallel": v("sequence-parallel", nproc=4, tp=2, num_layers=8),
        "buckets": v(*BUCKETS, nproc=4, num_layers=8),
        "ring": v("ring-attention", nproc=4, cp=2, num_layers=8),
    },
)
