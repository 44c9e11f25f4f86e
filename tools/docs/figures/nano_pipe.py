"""Picture of nano-pipe: Megatron's order, and the same with weight gradients behind."""

from __future__ import annotations

from mindspeed.pipeline.operations import PipelineShape
from mindspeed.pipeline.synthesis import delayed, lag_by_rank, megatron
from mindspeed.workbench.pictures.drawing import Picture
from tools.docs.figures.operations_over_time import LEGEND, timeline

_MEGATRON = megatron(PipelineShape(4, 1, 4))

PICTURES = (
    Picture(
        "nano-pipe",
        "Deferred weight gradients on four ranks",
        f"{LEGEND} A rank sends the gradient of its input one step earlier, and computes weight gradients in its idle time.",
        (
            (timeline("Megatron's 1F1B", _MEGATRON),),
            (timeline("nano-pipe", delayed(_MEGATRON, lag_by_rank(1, 4))),),
        ),
    ),
)
