"""Picture of dualpipev: its pairs, with both forms of the weight gradients."""

from __future__ import annotations

from mindspeed.pipeline.operations import PipelineShape
from mindspeed.pipeline.synthesis import dual_pipe_v, megatron
from mindspeed.workbench.pictures.drawing import Picture
from tools.docs.figures.operations_over_time import LEGEND, timeline

_LOOP, _V = PipelineShape(2, 2, 4), PipelineShape(2, 2, 4, "v")

PICTURES = (
    Picture(
        "dualpipev",
        "Two passes together, in a V of four stages on two ranks",
        f"{LEGEND} Where the boxes of two passes alternate, each computes while the tokens of the other one travel.",
        (
            (timeline("Megatron's interleaved schedule", megatron(_LOOP)),),
            (timeline("dualpipev", dual_pipe_v(_V, split=False)),),
            (timeline("dualpipev, split_weights", dual_pipe_v(_V, split=True)),),
        ),
    ),
)
