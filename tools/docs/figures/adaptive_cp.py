"""For the page: pictures of four ranks under a sliding window, and under a causal mask in the order of the sequence."""

from collections.abc import Iterator

from mindspeed.features.adaptive_cp.schedule import Block, Grid, schedule
from tools.docs.drawing import Arrow, Box, Mark, Matrix, Picture, Timeline

_RANKS = range(4)
_TOKENS = 32
_WINDOW = _TOKENS // 8


def _needed(sees: int) -> Grid:
    """Which blocks a causal mask needs under which a token sees so many, itself among them."""
    size = _TOKENS // len(_RANKS)
    return [[k <= q and k * size + size > q * size - sees + 1 for k in _RANKS] for q in _RANKS]


def _matrix(needed: Grid) -> Matrix:
    cells = {
        (block.query, block.key): Mark(str(number), block.where)
        for number, turn in enumerate(schedule(needed))
        for block in turn
    }
    names = [f"rank {rank}" for rank in _RANKS]
    return Matrix("Blocks: computed by (colour), in round (number)", names, [str(rank) for rank in _RANKS], cells, 34)


def _timeline(needed: Grid) -> Timeline:
    rounds = schedule(needed)
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
        ((_matrix(_needed(_WINDOW)), _timeline(_needed(_WINDOW))),),
    ),
    Picture(
        "adaptive-cp-causal",
        "Adaptive context parallelism: a causal mask, tokens in the order of the sequence",
        "Later ranks need more blocks, and ranks that have finished compute some of them. Either keys are "
        "sent to the queries (solid), or queries to the keys (dashed) and the results back (dotted).",
        ((_matrix(_needed(_TOKENS)),), (_timeline(_needed(_TOKENS)),)),
    ),
)
