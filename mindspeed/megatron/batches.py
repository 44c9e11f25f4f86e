"""Slices of a batch under context parallelism: calls of Megatron's function, in every release."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

from megatron.core import parallel_state, utils

Batch = dict[str, Any]

NOT_SLICED: Final = frozenset({"cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size", "hybrid_cp_group"})
"""Entries of a batch that have no dimension of tokens."""


def slice_batch(batch: Batch) -> Batch:
    """Call Megatron's ``get_batch_on_this_cp_rank``, or its replacement, and return this rank's share of a batch."""
    function: Callable[..., Batch] = utils.get_batch_on_this_cp_rank
    if "is_hybrid_cp" not in inspect.signature(function).parameters:  # before Megatron 0.18, and what stands for it
        return function(batch)
    return function(batch, is_hybrid_cp=False, cp_group=parallel_state.get_context_parallel_group())
