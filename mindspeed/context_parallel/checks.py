"""Shapes of tensors that are shares of one sequence."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mindspeed.context_parallel.layout import Layout
from mindspeed.ops.errors import require


def check_shares(
    op: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    ends: Sequence[Sequence[int]],
    layout: Layout,
    ranks: int,
) -> None:
    """Raise OperatorError unless all belong together: shares as long as ``layout`` gives them, mask rows of this share."""
    tokens, batch, heads, width = query.shape
    fits = key.shape[:3] == value.shape[:3] and key.shape[:2] == (tokens, batch) and key.shape[3] == width
    shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
    require(fits, op, f"query, key and value of shapes {shapes} are not chunks of one sequence")
    require(heads % key.shape[2] == 0, op, f"{heads} query heads are not divisible by {key.shape[2]} key heads")
    require(layout.ranks == ranks, op, f"the layout is for {layout.ranks} ranks, but the group has {ranks}")
    pieces = layout.count // ranks
    require(tokens % pieces == 0, op, f"{tokens} local tokens cannot be split into {pieces} equal chunks")
    check_mask(op, mask, batch, (tokens, tokens * ranks))
    fits = not ends or (len(ends) == batch and all(row and row[-1] == tokens * ranks for row in ends))
    require(fits, op, f"the document ends do not describe {batch} rows whose last document ends at {tokens * ranks}")


def check_mask(op: str, mask: Tensor | None, batch: int, shape: tuple[int, int]) -> None:
    """Raise OperatorError unless a mask has ``shape``, queries and keys, or that with [batch, 1] in front."""
    given = None if mask is None else tuple(mask.shape)
    expected = f"{shape} or {(batch, 1, *shape)}"
    require(given in (None, shape, (batch, 1, *shape)), op, f"mask has shape {given}, but {expected} is expected")
