"""Record one training step of this rank: the passes of its schedule, and the memory at their borders."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core import parallel_state

from mindspeed.files.step_record import Level, RecordedSpan, StepRecord
from mindspeed.pipeline.recording import collected
from mindspeed.platforms import runtime

Lap = Callable[[], tuple[int, int] | None]


def stage_of_rank() -> tuple[int, int] | None:
    """Return the pipeline stage of this rank and their number; None for all but its first rank."""
    if parallel_state.get_tensor_model_parallel_rank() or parallel_state.get_data_parallel_rank(with_context_parallel=True):
        return None
    return parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_world_size()


class StepRecorder:
    """Records a step. ``lap`` returns bytes now and at most since its last call, or None.

    ``in_passes``: the forward and backward passes of the step are running. On a device the times are those of the current
    stream, by its events, so that recording does not wait for it.
    """

    def __init__(self, lap: Lap) -> None:
        self._lap = lap
        self._on_cpu = runtime.platform() == "cpu"
        self.in_passes = False
        self._marks: list[tuple[str, int, int, Any, Any]] = []
        self._levels: list[tuple[Any, int, int]] = []
        self._in_flight = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Surround the step."""
        if not self._on_cpu:
            runtime.device_module().synchronize()
        self._clock, self._start = time.time(), time.perf_counter()
        self._begin = self._mark()
        with collected() as self._operations:
            yield
        self._end = self._mark()

    @contextmanager
    def passes(self) -> Iterator[None]:
        """Surround the forward and backward passes."""
        self._first = self._mark()
        self._level()
        self.in_passes = True
        yield
        self.in_passes = False
        self._level()
        self._last = self._mark()

    @contextmanager
    def span(self, kind: str, chunk: int = 0, micro_batch: int = 0) -> Iterator[None]:
        """Surround a pass, or loading data."""
        begin = self._mark()
        if kind != "L":
            self._level()
        self._in_flight += kind == "F"
        yield
        self._marks.append((kind, chunk, micro_batch, begin, self._mark()))
        if kind != "L":
            self._level(after=-1 if kind == "D" else 0)

    def record(self, step: int, stage: int, stages: int) -> StepRecord:
        """Return the record of the step that has ended."""
        if not self._on_cpu:
            runtime.device_module().synchronize()
        at = self._seconds
        spans = [RecordedSpan(kind, chunk, number, at(begin), at(end)) for kind, chunk, number, begin, end in self._marks]
        if self._operations:  # those of a schedule of its own, which has further kinds
            times = [(*timed.op, timed.begin - self._start, timed.end - self._start) for timed in self._operations]
            spans = [*(span for span in spans if span.kind == "L"), *(RecordedSpan(*row) for row in times)]
        levels = [Level(at(mark), size, passes) for mark, size, passes in self._levels]
        whole = at(self._first), at(self._last)
        return StepRecord(step, stage, stages, self._clock, at(self._end), whole, spans, step if levels else 0, levels)

    def _mark(self) -> Any:
        if self._on_cpu:
            return time.perf_counter()
        event = runtime.device_module().Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, mark: Any) -> float:
        return float(mark - self._begin if self._on_cpu else self._begin.elapsed_time(mark) / 1e3)

    def _level(self, after: int = 0) -> None:
        """Note the memory of now, and what it was at most since the last time; ``after`` changes the passes in between."""
        if (sizes := self._lap()) is None:
            return
        (now, most), mark = sizes, self._mark()
        if most > now:
            self._levels.append((mark, most, self._in_flight))
        self._in_flight += after
        self._levels.append((mark, now, self._in_flight))
