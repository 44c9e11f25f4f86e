"""The window of traced steps: one profiler from its first step to its last, and ranges named after features."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mindspeed.plugins.active import feature_ranges

if TYPE_CHECKING:
    from mindspeed.features.profiler.feature import ProfilerArgs

ALL = -1


def rank() -> int:
    """Return the rank of this process, 0 outside a job."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def is_traced(ranks: Sequence[int]) -> bool:
    """Return whether this rank is one of those that are traced."""
    return ALL in ranks or rank() in ranks


class TraceWindow:
    """Trace the steps after ``start`` up to ``end``; the trace is written when the last one ends, or the run does."""

    def __init__(self, args: ProfilerArgs, platform: str) -> None:
        self.args, self.platform = args, platform
        self._profiler: Any = None
        self._closed = False

    def step(self, step: int) -> AbstractContextManager[None] | None:
        """Return a context manager around a step of the log, None where it is not traced."""
        if self._closed or not self.args.start < step <= self.args.end:
            return None
        return self._traced(step)

    @contextmanager
    def _traced(self, step: int) -> Iterator[None]:
        if self._profiler is None:
            self._open()
        try:
            with torch.profiler.record_function(f"ProfilerStep#{step}"), feature_ranges(torch.profiler.record_function):
                yield
        except BaseException:
            self.close()
            raise
        if step >= self.args.end:
            self.close()

    def _open(self) -> None:
        self._profiler = make_profiler(self.args, self.platform)
        self._profiler.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Write the trace, if one is open."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        self._closed = True
        atexit.unregister(self.close)
        profiler.stop()
        if self.platform != "npu":  # its profiler writes by itself
            path = trace_path(self.args.folder, rank())
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))


def trace_path(folder: str, rank: int) -> Path:
    """Return the file of a rank's trace."""
    return Path(folder) / f"trace.rank{rank}.json.gz"


def make_profiler(args: ProfilerArgs, platform: str) -> Any:
    """Make the profiler of the platform; it begins with ``start()``."""
    if platform == "npu":
        from mindspeed.features.profiler.npu import make_profiler as make_npu_profiler

        return make_npu_profiler(args, rank())
    activities = torch.profiler.ProfilerActivity
    chosen = {"cpu": [activities.CPU], "cuda": [activities.CUDA, *([activities.CPU] if args.cpu else [])]}[platform]
    return torch.profiler.profile(
        activities=chosen, record_shapes=args.shapes, profile_memory=args.memory, with_stack=args.stack
    )
