"""The picture of one plan: what is requested, what becomes active and why, and what that changes in Megatron."""

from __future__ import annotations

from typing import Final

from mindspeed import registry
from mindspeed.engine.resolution.environment import made_up
from mindspeed.engine.resolution.request import Layer
from mindspeed.workbench.pictures.drawing import Picture
from mindspeed.workbench.pictures.plan_graph import plan_graph

REQUEST: Final = Layer(
    "job file",
    features=("sequence-parallel", "distributed-optimizer", "swiglu"),
    world={"world_size": 4, "tp": 2, "activation": "silu", "gated_linear_unit": True},
    level=2,
    without=("flash-attention", "matmul-add", "rms-norm", "rotary-embedding"),
)


def plan_picture() -> Picture:
    """Draw the plan of `REQUEST` for megatron-core 0.16.1 on the CPU."""
    text = (
        "Three features are requested. The plan adds what they require, puts all into one order with a reason for each, and "
        "lists every argument and every function of Megatron that changes."
    )
    picture = plan_graph(
        registry.resolve([REQUEST], made_up("cpu", "0.16.1")), "A plan: 4 processes, tensor parallelism of 2", text
    )
    if picture is None:
        raise ValueError("the plan of the picture has no feature")
    return picture
