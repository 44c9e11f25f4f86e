"""For the page: pictures of a ring and of a double ring of four ranks."""

from mindspeed.context_parallel import costs
from mindspeed.context_parallel.layout import zigzag
from mindspeed.context_parallel.ring import Rounds
from mindspeed.workbench.pictures.drawing import Picture
from tools.docs.figures.blocks_over_time import bytes_lines, pieces_strip, ring_timeline, scores, step_of

_LAYOUT, _RING, _DOUBLE = zigzag(4), Rounds(4), Rounds(4, 2)

PICTURES = (
    Picture(
        "ring-attention",
        "Ring attention of four ranks",
        "The sequence has eight chunks in zig-zag order: rank 0 holds the first and the last. In each step, "
        "every rank computes its queries with the keys that it has, and sends these keys to the next rank "
        "(dark: pairs that a causal mask allows, half of a block).",
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
        "Inside a window, blocks are sent to the neighbour in every step (solid). They are sent to the same "
        "position in the next window once in two steps (dashed), overlapped with both steps.",
        ((ring_timeline(_LAYOUT, _DOUBLE, "window = 2: solid to the neighbour, dashed to the next window"),),),
    ),
)

LINES = bytes_lines(costs.ring)
