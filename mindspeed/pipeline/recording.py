"""Times of a rank's operations in a step: a file for a timeline, and means over all ranks as the costs of a schedule."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from mindspeed.pipeline.operations import Costs, Kind, Op, PipelineShape

_KINDS: Final[tuple[Kind, ...]] = ("F", "B", "W", "R")


class Timed(NamedTuple):
    """Operation with the seconds of its begin and its end, and how long it waited for its message before."""

    op: Op
    begin: float
    end: float
    waited: float


def device_time() -> float:
    """Return the time in seconds when the current stream has run its work.

    A synchronization of the device would also wait for receives that are started ahead, whose sender may wait for this rank.
    """
    torch.cuda.current_stream().synchronize()
    return time.perf_counter()


_collecting: list[list[Timed]] = []


@contextmanager
def collected() -> Iterator[list[Timed]]:
    """Yield the list to which schedules add the operations that they run inside, with their times."""
    _collecting.append([])
    try:
        yield _collecting[-1]
    finally:
        _collecting.pop()


def is_collecting() -> bool:
    """Return whether operations are to be timed for `collected`."""
    return bool(_collecting)


def collect(timed: Sequence[Timed]) -> None:
    """Hand operations to `collected`, where it is entered."""
    for found in _collecting:
        found.extend(timed)


def write_trace(folder: str, timed: Sequence[Timed]) -> None:
    """Write the operations of this rank for ``mindspeed schedule show --trace``, over those of the step before."""
    path = Path(folder) / f"rank-{dist.get_rank()}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps([*line.op, line.begin, line.end, line.waited]) for line in timed)
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")


def agreed_costs(timed: Sequence[Timed], shape: PipelineShape, rank: int, before: Costs) -> Costs:
    """Return the mean milliseconds of each kind of operation on each stage; collective over the job.

    All ranks get the same numbers, also those of other pipelines: their collectives follow the lists that are made of them. The
    duration of a hop, and of a kind that a stage has not run, are those of ``before``.
    """
    sums = torch.zeros(2, len(_KINDS), shape.stages, dtype=torch.float64)
    for op, begin, end, _ in timed:
        if op.kind in _KINDS:
            place = _KINDS.index(op.kind), shape.stage_of(rank, op.chunk)
            sums[0][place] += (end - begin) * 1e3
            sums[1][place] += 1
    everywhere = sums.to(torch.cuda.current_device(), torch.float32)
    dist.all_reduce(everywhere)
    dist.broadcast(everywhere, 0)
    totals, counts = everywhere.tolist()
    means: dict[str, Any] = {
        kind: tuple(
            total / count if count else before.of(kind, stage)
            for stage, (total, count) in enumerate(zip(totals[place], counts[place], strict=True))
        )
        for place, kind in enumerate(_KINDS)
    }
    return replace(before, **means)
