"""Picture of zero-bubble: both placements of stages."""

from __future__ import annotations

from mindspeed.pipeline.operations import Costs, PipelineShape
from mindspeed.pipeline.search import fastest
from mindspeed.pipeline.synthesis import megatron
from mindspeed.workbench.pictures.drawing import Picture
from tools.docs.figures.operations_over_time import LEGEND, timeline

_LOOP, _V = PipelineShape(2, 2, 4), PipelineShape(2, 2, 4, "v")

PICTURES = (
    Picture(
        "zero-bubble",
        "Both placements of four stages on two ranks",
        f"{LEGEND} In a loop, rank 0 has stages 0 and 2; in a V it has the first stage and the last one.",
        (
            (timeline("Megatron's interleaved schedule", megatron(_LOOP)),),
            (timeline("zero-bubble, placement loop", fastest(_LOOP, Costs())[0]),),
            (timeline("zero-bubble, placement v", fastest(_V, Costs())[0]),),
        ),
    ),
)
