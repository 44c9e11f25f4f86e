"""Picture of recompute-in-bubble: the fewest activation sets that have to be dropped."""

from __future__ import annotations

from mindspeed.pipeline.operations import PipelineShape
from mindspeed.pipeline.recomputation import recompute_least
from mindspeed.pipeline.synthesis import megatron
from mindspeed.workbench.pictures.drawing import Picture
from tools.docs.figures.operations_over_time import LEGEND, timeline

_MEGATRON = megatron(PipelineShape(4, 1, 4))

PICTURES = (
    Picture(
        "recompute-in-bubble",
        "A limit on kept activations, on four ranks",
        f"{LEGEND} Without a limit, rank 0 keeps the activations of four forward passes. With a limit of "
        "two, a rank frees those that it needs last.",
        (
            (timeline("Megatron's 1F1B without recompute", _MEGATRON),),
            (timeline("recompute-in-bubble, at most two sets", recompute_least(_MEGATRON, 2)),),
        ),
    ),
)
