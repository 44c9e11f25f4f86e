"""Save from threads of the rank: a synchronous save starts no process, and no process outlives the rank."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import parent_process
from queue import Queue, SimpleQueue
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async

from mindspeed.engine.runtime.parent_process import end_with
from mindspeed.plugins.patches import Function, wrapper


@wrapper
def collect_in_process(original: Function, *args: Any, **kwargs: Any) -> None:
    """``save`` of a strategy: pass results from the writers to the end of the save without another process.

    The queue of asynchronous saves, and what their writers have put into it, is kept.
    """
    shared: Any = filesystem_async._results_queue
    filesystem_async._results_queue = SimpleQueue()
    try:
        original(*args, **kwargs)
    finally:
        filesystem_async._results_queue = shared


@wrapper
def write_in_threads(
    original: Function, transforms: Any, use_msc: bool, rank: int, buckets: Sequence[Any], results: Any
) -> None:
    """``write_preloaded_data_multiproc``: write the files of a synchronous save in threads, as Megatron does since 0.17.

    The rank would wait forever for a forked writer that is killed.
    """
    if not isinstance(results, SimpleQueue):
        original(transforms, use_msc, rank, buckets, results)
        return
    written: SimpleQueue[tuple[int, Any]] = SimpleQueue()
    open_files: Queue[int] = Queue()
    write_bucket = filesystem_async.FileSystemWriterAsync.write_preloaded_data
    options = {"use_msc": True} if use_msc else {}

    def write(index: int, bucket: Any) -> None:
        open_files.put(index)
        write_bucket(transforms, index, bucket, results_queue=written, count_queue=open_files, use_fsync=True, **options)

    with ThreadPoolExecutor(len(buckets)) as pool:
        list(pool.map(write, range(len(buckets)), buckets))
    outcomes = dict(written.get() for _ in buckets)
    results.put(next((outcome for outcome in outcomes.values() if isinstance(outcome, Exception)), outcomes))


@wrapper
def end_with_rank(original: Function, *args: Any, results_queue: Any, **kwargs: Any) -> None:
    """``write_preloaded_data``, in a process that the rank forked: end with the rank, also when it is killed."""
    if not isinstance(results_queue, SimpleQueue) and (rank := parent_process()) is not None and rank.pid is not None:
        end_with(rank.pid)
    original(*args, results_queue=results_queue, **kwargs)
