"""For the page: a picture of hybrid attention: head all-to-alls of two neighbours, in a ring of two."""

from mindspeed.context_parallel import costs
from mindspeed.context_parallel.layout import nested, zigzag
from mindspeed.context_parallel.ring import Rounds
from mindspeed.workbench.pictures.drawing import Picture
from tools.docs.drawing import Arrow, Box, Timeline
from tools.docs.figures.blocks_over_time import bytes_lines, pieces_strip, seen

_DEGREE, _RINGS = 2, 2
_RANKS = range(_DEGREE * _RINGS)
_LAYOUT, _OUTER, _ROUNDS = nested(zigzag(_RINGS), _DEGREE), zigzag(_RINGS), Rounds(_RINGS)


def _timeline() -> Timeline:
    """An all-to-all, the steps of the ring, an all-to-all."""
    last = _RINGS + 1
    boxes = {(rank, time): Box(f"tokens {rank}", rank) for rank in _RANKS for time in (0, last)}
    arrows = []
    for rank in _RANKS:
        (ring, head), first = divmod(rank, _DEGREE), rank - rank % _DEGREE
        for step in range(_RINGS):
            block = _ROUNDS.block(ring, step)
            keys = f"keys {block * _DEGREE}+{block * _DEGREE + 1}, heads {'ab'[head]}"
            visible = seen(_OUTER, ring, _OUTER.spans(block, 2 * _OUTER.count))
            boxes[rank, step + 1] = Box(keys, block * _DEGREE + head, visible)
            arrows += [
                Arrow((rank, step + 1), (hop.to * _DEGREE + head, hop.due + 1), "far") for hop in _ROUNDS.hops(ring, step)
            ]
        neighbours = [other for other in range(first, first + _DEGREE) if other != rank]
        arrows += [Arrow((rank, time), (other, time + 1)) for time in (0, last - 1) for other in neighbours]
    names = ["around", *(f"step {step}" for step in range(_RINGS)), "around"]
    title = "What travels when, forward: solid tokens for heads among neighbours, dashed keys around the ring"
    return Timeline(title, names, boxes, arrows, len(_RANKS), width=164, gap=56)


PICTURES = (
    Picture(
        "hybrid-attention",
        "Hybrid attention: head all-to-alls of two neighbours, in a ring of two",
        "Ranks 0 and 1, and ranks 2 and 3, exchange tokens for heads. Each rank then has the tokens of both "
        "with half of the heads. Ranks 0 and 2, and ranks 1 and 3, form rings that pass blocks of keys. "
        "Finally, an all-to-all sends the outputs back.",
        ((pieces_strip(_LAYOUT, "Who holds which piece"),), (_timeline(),)),
    ),
)

LINES = bytes_lines(lambda a, ranks: costs.hybrid(a, _DEGREE, ranks // _DEGREE), (4, 8))
