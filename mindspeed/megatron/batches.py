"""Slices of a batch under context parallelism: calls of Megatron's function, and stand-ins for it, in every release."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, Final

import torch.distributed as dist
from megatron.core import parallel_state, utils

from mindspeed.plugins.problems import MindSpeedError, Problem

Batch = dict[str, Any]

NOT_SLICED: Final = frozenset({"cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size", "hybrid_cp_group"})
"""Entries of a batch that have no dimension of tokens."""


def slice_batch(batch: Batch) -> Batch:
    """Call Megatron's ``get_batch_on_this_cp_rank``, or what stands for it, and return this rank's share of a batch."""
    function: Callable[..., Batch] = utils.get_batch_on_this_cp_rank
    if "is_hybrid_cp" not in inspect.signature(function).parameters:  # before Megatron 0.18, and what stands for it
        return function(batch)
    return function(batch, is_hybrid_cp=False, cp_group=parallel_state.get_context_parallel_group())


def batch_slicer(share: Callable[[Batch, Any], Batch]) -> Callable[..., Batch]:
    """Make a stand-in for ``get_batch_on_this_cp_rank`` of ``share(batch, group)``, with the parameters of every release.

    Raises MS304 for a batch of Megatron's hybrid context parallelism, whose samples have groups of their own.
    """

    @wraps(share)
    def get_batch_on_this_cp_rank(batch: Batch, *rest: Any, **named: Any) -> Batch:
        if batch.get("local_cp_size") is not None:
            text = "hybrid_context_parallel spreads every sample over ranks of its own, and the plan's algorithm has one group"
            raise MindSpeedError([Problem("MS304", text, fix="drop --hybrid-context-parallel, or the plan's algorithm")])
        group = named.get("cp_group") or next((given for given in rest if isinstance(given, dist.ProcessGroup)), None)
        return share(batch, group)

    del get_batch_on_this_cp_rank.__wrapped__  # the signature is not that of ``share``
    return get_batch_on_this_cp_rank
