"""Requirements of nano-pipe: stages, and nobody else's schedule."""

from __future__ import annotations

import pytest

from mindspeed.features.nano_pipe.feature import NanoPipe, NanoPipeArgs
from mindspeed.job.world import World
from mindspeed.pipeline.operations import Costs, PipelineShape
from mindspeed.plugins import MindSpeedError
from tests.features.resolving import active, refusals


class Config:
    """Megatron's configuration with the given arguments."""

    def __init__(self, **arguments: object) -> None:
        self.__dict__.update(arguments)


def feature(**settings: object) -> NanoPipe:
    return NanoPipe(NanoPipeArgs(**settings), World({"pp": 4}))


def test_one_stage_is_refused_and_two_are_not() -> None:
    assert refusals("nano-pipe") == [
        "MS304 nano-pipe: one pipeline stage waits for no other, and there is 1 | --pp 2 or more, or remove nano-pipe"
    ]
    assert active("nano-pipe", pp=2)[-1] == "nano-pipe"


def test_the_schedule_is_megatrons_with_the_weight_gradients_behind() -> None:
    planned = feature().planned_schedule(PipelineShape(4, 1, 8), Costs())
    assert "".join(op.kind for op in planned.ops[0]) == "FFFF" + "BWF" * 4 + "BW" * 4
    assert "".join(op.kind for op in planned.ops[3]) == "FBFBFBFBW" + "FBW" * 4 + "WWW"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("overlap_moe_expert_parallel_comm", True),
        ("defer_embedding_wgrad_compute", True),
        ("enable_cuda_graph", True),
        ("cuda_graph_impl", "local"),
        ("fine_grained_activation_offloading", True),
        ("use_ring_exchange_p2p", True),
        ("num_microbatches_with_partial_activation_checkpoints", 2),
    ],
)
def test_arguments_of_megatron_that_keep_an_order_of_their_own_are_refused(name: str, value: object) -> None:
    with pytest.raises(MindSpeedError, match=f"MS304 nano-pipe: {name}"):
        feature().config_ready(Config(**{name: value}))
    feature().config_ready(Config(cuda_graph_impl="none", **{name: None} if name != "cuda_graph_impl" else {}))
