"""For the page: a picture of gathered attention of four ranks."""

from mindspeed.context_parallel import costs
from mindspeed.context_parallel.layout import zigzag
from mindspeed.workbench.pictures.drawing import Picture
from tools.docs.drawing import Arrow, Box, Timeline
from tools.docs.figures.blocks_over_time import bytes_lines, pieces_strip, scores, seen

_LAYOUT, _RANKS = zigzag(4), range(4)
_ALL = [(0, 2 * _LAYOUT.count)]

PICTURES = (
    Picture(
        "kv-allgather-cp",
        "All-gather attention of four ranks",
        "The sequence has eight chunks in zig-zag order: rank 0 holds the first and the last. Every rank "
        "sends its keys and values to all others. Then it computes its queries with all keys in one step "
        "(dark: pairs that a causal mask allows).",
        (
            (
                pieces_strip(_LAYOUT, "Who holds which piece"),
                scores(_LAYOUT, lambda q, _: str(q), "Scores, and the rank that computes them"),
            ),
            (
                Timeline(
                    "What travels when: keys and values, all to all, forward",
                    ["own", "all"],
                    {
                        **{(rank, 0): Box(f"keys {rank}", rank) for rank in _RANKS},
                        **{(rank, 1): Box("queries " + str(rank), rank, seen(_LAYOUT, rank, _ALL)) for rank in _RANKS},
                    },
                    [Arrow((rank, 0), (other, 1)) for rank in _RANKS for other in _RANKS if rank != other],
                    width=124,
                    gap=110,
                ),
            ),
        ),
    ),
)

LINES = bytes_lines(costs.gathered)
