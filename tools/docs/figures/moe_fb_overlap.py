"""Picture of moe-fb-overlap: its pairs, without stages and in Megatron's interleaved schedule."""

from __future__ import annotations

from mindspeed.pipeline.operations import PipelineShape
from mindspeed.pipeline.synthesis import megatron, paired
from mindspeed.workbench.pictures.drawing import Picture
from tools.docs.figures.operations_over_time import LEGEND, timeline

_ALONE, _STAGES = PipelineShape(1, 1, 4), PipelineShape(2, 2, 4)

PICTURES = (
    Picture(
        "moe-fb-overlap",
        "Two passes together",
        f"{LEGEND} Where the boxes of two passes alternate, each computes while the tokens of the other one travel.",
        (
            (timeline("moe-fb-overlap without stages", paired(_ALONE)),),
            (timeline("Megatron's interleaved schedule", megatron(_STAGES)),),
            (timeline("moe-fb-overlap, four stages on two ranks", paired(_STAGES)),),
        ),
    ),
)
