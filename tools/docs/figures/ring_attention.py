"""For the page: pictures of a ring and of a double ring of four ranks."""

from mindspeed.context_parallel import costs
from mindspeed.context_parallel.layout import zigzag
from mindspeed.context_parallel.ring_schedule import Rounds
from tools.docs.drawing import Picture
from tools.docs.figures.blocks_over_time import bytes_lines, pieces_strip, ring_timeline, scores, step_of

_LAYOUT, _RING, _DOUBLE = zigzag(4), Rounds(4), Rounds(4, 2)

PICTURES = (
    Picture(
        "ring-attention",
        "Ring attention of four ranks",
        "Eight pieces in zig-zag: rank 0 holds the first and the last. At each step every rank computes its queries against "
        "the keys that it has (dark is what a causal mask shows: half of a block) while it sends them to the next rank.",
        (
            (
                pieces_strip(_LAYOUT, "Who holds which piece"),
                scores(_LAYOUT, lambda q, k: str(step_of(_RING, q, k)), "Scores: rank by colour, step by number"),
            ),
            (ring_timeline(_LAYOUT, _RING, "What travels when: blocks of keys and values, forward"),),
        ),
    ),
    Picture(
        "ring-attention-double",
        "A double ring of two windows of two ranks",
        "Inside a window blocks go to the neighbour at every step (solid); to the same place of the next window they go once "
        "in two steps (dashed), while both of those compute.",
        ((ring_timeline(_LAYOUT, _DOUBLE, "window = 2: solid to the neighbour, dashed to the next window"),),),
    ),
)

LINES = bytes_lines(costs.ring)
