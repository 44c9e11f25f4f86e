"""Picture of recompute-in-advance: forward passes that are repeated while a rank waits."""

from __future__ import annotations

from mindspeed.pipeline.operations import PipelineShape
from mindspeed.pipeline.recomputation import recompute_all
from mindspeed.pipeline.synthesis import megatron
from mindspeed.workbench.pictures.drawing import Picture
from tools.docs.figures.operations_over_time import LEGEND, timeline

_MEGATRON = megatron(PipelineShape(4, 1, 4))

PICTURES = (
    Picture(
        "recompute-in-advance",
        "Full recomputation on four ranks",
        f"{LEGEND} Megatron repeats a forward pass after the gradient has arrived, the feature before it arrives.",
        (
            (timeline("Megatron's 1F1B, recompute in the backward pass", _MEGATRON, recompute_in_backward=True),),
            (timeline("recompute-in-advance", recompute_all(_MEGATRON)),),
        ),
    ),
)
