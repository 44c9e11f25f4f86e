"""The queue of a synchronous save's results, in the process that saves."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async

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
