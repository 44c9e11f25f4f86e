"""Jobs that dualpipev refuses, with what would do."""

from typing import Any

import pytest

from mindspeed.features.dualpipev.feature import DualPipeVArgs, linear_layers_are_split
from mindspeed.job.world import World
from mindspeed.plugins.conditions import failure
from tests.features.resolving import active, refusals

V: dict[str, Any] = {"pp": 2, "vpp": 2}
SPLIT: dict[str, dict[str, object]] = {"dualpipev": {"split_weights": True}}


@pytest.mark.parametrize(
    ("world", "sentence", "fix"),
    [
        ({"vpp": 4}, "dualpipev needs two model chunks on each rank, but vpp is 4", "--vpp 2"),
        (
            {"global_batch_size": 8},
            "the number of micro-batches per step is 2, but dualpipev needs at least 2 pp - 1 = 3",
            "--global-batch-size 12 or more",
        ),
        ({"first_stage_layers": 2}, "but the job gives the first stage 2 layers", "remove dualpipev"),
    ],
)
def test_a_job_that_does_not_fit_is_refused(world: dict[str, Any], sentence: str, fix: str) -> None:
    found = refusals("dualpipev", **V | world)
    assert any(sentence in text and fix in text for text in found), found


def test_weight_gradients_that_are_apart_exclude_other_linear_layers_and_others_do_not() -> None:
    assert active("dualpipev", "coc", "sequence-parallel", tp=2, **V)[-1] in ("dualpipev", "coc")
    assert any("computes the weight gradients" in text for text in refusals("dualpipev", "coc", settings=SPLIT, tp=2, **V))


@pytest.mark.parametrize(("over_local", "refused"), [(False, True), (True, False)])
def test_linear_layers_of_transformer_engine_are_not_split(over_local: bool, refused: bool) -> None:
    world = World({"transformer_engine_layers": True, "engine_over_local": over_local})
    assert bool(failure(linear_layers_are_split, "dualpipev", DualPipeVArgs(split_weights=True), world)) is refused
    assert failure(linear_layers_are_split, "dualpipev", DualPipeVArgs(), world) is None
