"""For the page: pictures of four ranks under a sliding window, and under a causal mask in the order of the sequence."""

from collections.abc import Iterator

from mindspeed.features.adaptive_cp.schedule import Block, Grid, schedule
from mindspeed.workbench.pictures.drawing import Picture
from tools.docs.drawing import Arrow, Box, Mark, Matrix, Timeline

_RANKS = range(4)
_TOKENS = 32
_WINDOW = _TOKENS // 8


def _pairs(sees: int) -> Grid:
    """The visible pairs of each block under a causal mask under which a token sees so many, itself among them."""
    parts = [range(rank * _TOKENS // len(_RANKS), (rank + 1) * _TOKENS // len(_RANKS)) for rank in _RANKS]
    return [[sum(0 <= i - j < sees for i in queries for j in keys) for keys in parts] for queries in parts]


def _matrix(pairs: Grid) -> Matrix:
    cells = {
        (block.query, block.key): Mark(str(number), block.where)
        for number, turn in enumerate(schedule(pairs))
        for block in turn
    }
    names = [f"rank {rank}" for rank in _RANKS]
    return Matrix("Blocks: computed by (colour), in round (number)", names, [str(rank) for rank in _RANKS], cells, 34)


def _timeline(pairs: Grid) -> Timeline:
    rounds = schedule(pairs)
    placed = [(time, block) for time, turn in enumerate(rounds) for block in turn]
    boxes = {(block.where, time): Box(f"Q{block.query} · K{block.key}", block.where) for time, block in placed}
    names = [f"round {time}" for time in range(len(rounds))]
    if any(block.moves_queries for _, block in placed):
        names.append("results")
    arrows = [arrow for time, block in placed for arrow in _arrows(time, block)]
    return Timeline("What travels when, forward", names, boxes, arrows, len(_RANKS))


def _arrows(time: int, block: Block) -> Iterator[Arrow]:
    """What is posted a round ahead, and a result that goes back during the next."""
    if block.moves_keys:
        yield Arrow((block.key, time - 1), (block.where, time))
    if block.moves_queries:
        yield Arrow((block.query, time - 1), (block.where, time), "query")
        yield Arrow((block.where, time), (block.query, time + 1), "result")


PICTURES = (
    Picture(
        "adaptive-cp",
        "Adaptive context parallelism: a sliding window of an eighth of the sequence",
        "A rank needs its own block and that of the previous rank. No other block is sent or computed.",
        ((_matrix(_pairs(_WINDOW)), _timeline(_pairs(_WINDOW))),),
    ),
    Picture(
        "adaptive-cp-causal",
        "Adaptive context parallelism: a causal mask, tokens in the order of the sequence",
        "Later ranks need more blocks, and ranks with less work compute some of them. Either keys are "
        "sent to the queries (solid), or queries to the keys (dashed) and the results back (dotted).",
        ((_matrix(_pairs(_TOKENS)),), (_timeline(_pairs(_TOKENS)),)),
    ),
)
