"""Group lists: how the rows of one tensor belong to consecutive groups."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mindspeed.ops.errors import require


def group_tensor(op: str, group_list: Tensor | Sequence[int]) -> Tensor:
    """The group list as an int64 vector. Raises OperatorError unless it is one of at least one integer."""
    groups = group_list if isinstance(group_list, Tensor) else torch.tensor(list(group_list), dtype=torch.int64)
    fits = groups.dim() == 1 and groups.shape[0] > 0 and groups.dtype in (torch.int32, torch.int64)
    require(fits, op, f"group_list is {groups.dtype} of shape {tuple(groups.shape)}, but must be a vector of integers")
    return groups.long()


def group_ranges(op: str, groups: Tensor, rows: int, cumulative: bool) -> list[tuple[int, int]]:
    """``(start, end)`` of each group. Raises OperatorError unless they cover ``rows`` rows one after the other."""
    ends = (groups if cumulative else groups.cumsum(0)).tolist()
    ranges = list(zip([0, *ends[:-1]], ends, strict=True))
    ascending = all(start <= end for start, end in ranges)
    require(ascending and ends[-1] == rows, op, f"the groups end at {ends}, but must be ascending up to the {rows} rows")
    return ranges
