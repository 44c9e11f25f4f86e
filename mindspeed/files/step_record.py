"""The record of one step on one rank: its operations, their times, and its memory. Light."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

FOLDER: Final = "steps"
"""Folder of a run with the records, one file per pipeline stage."""
SECTIONS: Final = (
    *("data", "forward", "recomputation", "backward", "weight gradients", "forward and backward", "waiting for other stages"),
    *("gradient exchange", "optimizer", "other"),
)
"""Kinds of work in a step, in their order."""
_SECTION_OF: Final = {
    "L": "data",
    "F": "forward",
    "R": "recomputation",
    "B": "backward",
    "D": "backward",
    "W": "weight gradients",
}


class RecordedSpan(NamedTuple):
    """Work of a rank between two times in seconds.

    ``kind`` is that of an operation (`mindspeed.pipeline.operations.Kind`) of a chunk and a micro-batch, or L: loading data.
    """

    kind: str
    chunk: int
    micro_batch: int
    begin: float
    end: float


class Level(NamedTuple):
    """Bytes on the device at a time in seconds, and the passes whose activations it has then."""

    seconds: float
    bytes: int
    passes: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Hold one step of the first rank of a pipeline stage; times in seconds from its begin.

    ``clock`` is the time of day of the begin, ``seconds`` the length of the step. The passes of the schedule took the time
    from ``passes`` [0] to [1]. ``memory`` is of the step ``memory_step``, which on the CPU is another one.
    """

    step: int
    stage: int
    stages: int
    clock: float
    seconds: float
    passes: tuple[float, float]
    spans: Sequence[RecordedSpan]
    memory_step: int = 0
    memory: Sequence[Level] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)

    def write(self, run: Path) -> None:
        """Write the record into a run folder, over that of an earlier step."""
        path = run / FOLDER / f"stage-{self.stage}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @property
    def sections(self) -> dict[str, float]:
        """Seconds of each kind of work; together they are the whole step."""
        found: defaultdict[str, float] = defaultdict(float)
        for span in self.spans:
            found[_SECTION_OF[span.kind]] += span.end - span.begin
        found["forward"] -= found["data"]  # a forward pass loads its micro-batch
        begin, end = self.passes
        work = [span for span in self.spans if span.kind != "L"]
        if work:
            last = max(span.end for span in work)
            between = last - begin - sum(span.end - span.begin for span in work)
            found["waiting for other stages" if self.stages > 1 else "other"] += between
            found["gradient exchange"] = end - last
        else:
            found["forward and backward"] = end - begin - found["data"]
        found["optimizer"] = self.seconds - end
        found["other"] += begin
        return {name: seconds for name, seconds in found.items() if seconds > 0}


def read_records(run: Path) -> list[StepRecord]:
    """Return the records of a run by pipeline stage; files that a process did not finish are skipped."""
    found = []
    for path in (run / FOLDER).glob("stage-*.json"):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            data["spans"] = [RecordedSpan(*row) for row in data["spans"]]
            data["memory"] = [Level(*row) for row in data["memory"]]
            data["passes"] = tuple(data["passes"])
            found.append(StepRecord(**data))
        except (OSError, ValueError, TypeError, LookupError):
            continue
    return sorted(found, key=lambda record: record.stage)
