"""The schedule of nano-pipe; what it needs is in tests/pipeline."""

from mindspeed.features.nano_pipe.feature import NanoPipe, NanoPipeArgs
from mindspeed.job.world import World
from mindspeed.pipeline.operations import Costs, PipelineShape


def feature(**settings: object) -> NanoPipe:
    return NanoPipe(NanoPipeArgs(**settings), World({"pp": 4}))


def test_the_schedule_is_megatrons_with_the_weight_gradients_behind() -> None:
    planned = feature().planned_schedule(PipelineShape(4, 1, 8), Costs())
    assert "".join(op.kind for op in planned.ops[0]) == "FFFF" + "BWF" * 4 + "BW" * 4
    assert "".join(op.kind for op in planned.ops[3]) == "FBFBFBFBW" + "FBW" * 4 + "WWW"
