"""For the page: a picture of Ulysses attention of four ranks."""

from mindspeed.context_parallel import costs
from mindspeed.context_parallel.layout import contiguous
from mindspeed.workbench.pictures.drawing import Picture
from tools.docs.drawing import Arrow, Box, Mark, Matrix, Timeline
from tools.docs.figures.blocks_over_time import bytes_lines, holders

_LAYOUT, _RANKS, _HEADS = contiguous(4), range(4), 4
_TOKENS = [f"piece {piece}" for piece in range(_LAYOUT.count)]
_NAMES = [str(head) for head in range(_HEADS)]
_PLACES = [(piece, head) for piece in range(_LAYOUT.count) for head in range(_HEADS)]
_OTHERS = [(rank, other) for rank in _RANKS for other in _RANKS if rank != other]

PICTURES = (
    Picture(
        "ulysses-attention",
        "Ulysses attention of four ranks",
        "Before and after attention, a rank holds contiguous tokens with all heads. During attention it "
        "holds all tokens with one of four heads. All-to-alls of query, key and value change the first into "
        "the second, and an all-to-all of the output changes it back.",
        (
            (
                Matrix(
                    "Around: rank by tokens", _TOKENS, _NAMES, {p: Mark(str(holders(_LAYOUT)[p[0]]), p[0]) for p in _PLACES}, 34
                ),
                Matrix("In attention: rank by head", _TOKENS, _NAMES, {p: Mark(str(p[1]), p[1]) for p in _PLACES}, 34),
            ),
            (
                Timeline(
                    "What travels when, forward",
                    ["query, key, value", "attention", "result"],
                    {
                        **{(rank, time): Box(f"tokens {rank}", rank) for rank in _RANKS for time in (0, 2)},
                        **{(rank, 1): Box(f"head {rank}, all tokens", rank) for rank in _RANKS},
                    },
                    [Arrow((rank, time), (other, time + 1)) for time in (0, 1) for rank, other in _OTHERS],
                    width=140,
                    gap=110,
                ),
            ),
        ),
    ),
)

LINES = bytes_lines(costs.ulysses)
