"""The processes beside a rank that saves: no more than needed, and none that outlives it."""

from __future__ import annotations

from multiprocessing import parent_process
from queue import SimpleQueue
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async

from mindspeed.engine.runtime.parent_process import end_with
from mindspeed.plugins.wrapping import Function, wrapper


@wrapper
def collect_in_process(original: Function, *args: Any, **kwargs: Any) -> None:
    """``save`` of a strategy: pass results from the writer to the end of the save without another process.

    The queue of asynchronous saves, and what their writers have put into it, is kept.
    """
    shared: Any = filesystem_async._results_queue
    filesystem_async._results_queue = SimpleQueue()
    try:
        original(*args, **kwargs)
    finally:
        filesystem_async._results_queue = shared


@wrapper
def end_with_rank(original: Function, *args: Any, **kwargs: Any) -> None:
    """``write_preloaded_data``, in a process that the rank forked: end with the rank, also when it is killed."""
    if (rank := parent_process()) is not None and rank.pid is not None:
        end_with(rank.pid)
    original(*args, **kwargs)
