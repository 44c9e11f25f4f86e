"""Slices of a batch and of a position table for one rank, in the place of Megatron's functions, which know zig-zag only."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mindspeed.context_parallel.layout import Layout
from mindspeed.megatron.batches import NOT_SLICED, Batch


def batch_share(
    batch: dict[str, Any], group: Any, layout_of: Callable[[int], Layout], rows: Callable[[Tensor], Tensor]
) -> dict[str, Any]:
    """This rank's share of every tensor [samples, tokens, ...], in place; ``rows`` takes those of a mask that count here."""
    group = group or parallel_state.get_context_parallel_group()
    if group.size() > 1:
        layout = layout_of(group.size())
        for name, value in batch.items():
            if value is not None and name not in NOT_SLICED:
                batch[name] = rows(value) if name == "attention_mask" else layout.take(value, group.rank(), 1)
    return batch


def table_share(table: Tensor, dim: int, group: Any, layout_of: Callable[[int], Layout]) -> Tensor:
    """This rank's share of dimension ``dim`` of a table of all positions."""
    return layout_of(group.size()).take(table, group.rank(), dim)


def batch_slicer(share: Callable[[Batch, Any], Batch]) -> Callable[..., Batch]:
    """Make a stand-in for ``get_batch_on_this_cp_rank`` of ``share(batch, group)``, with the parameters of every release."""

    @wraps(share)
    def get_batch_on_this_cp_rank(batch: Batch, *rest: Any, **named: Any) -> Batch:
        group = named.get("cp_group") or next((given for given in rest if isinstance(given, dist.ProcessGroup)), None)
        return share(batch, group)

    del get_batch_on_this_cp_rank.__wrapped__  # the signature is not that of ``share``
    return get_batch_on_this_cp_rank
