"""Sum the time of a trace by feature, operator, collective and wait, for each rank."""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from mindspeed.problems import Fix, Problem, RunError, advice

RowKind = Literal["feature", "operator", "collective", "wait"]
KINDS: Final[tuple[RowKind, ...]] = ("feature", "operator", "collective", "wait")
_RANK: Final = re.compile(r"rank(\d+)\.json(\.gz)?$")
_STEP: Final = re.compile(r"ProfilerStep#(\d+)$")
_COLLECTIVE: Final = re.compile(r"^(c10d::|gloo:|nccl:|ncclDevKernel|hccl|hcom_|record_param_comms)", re.IGNORECASE)
_WAIT: Final = re.compile(r"(\bwait|Wait|Synchronize|synchronize)")


@dataclass(frozen=True, slots=True)
class RankSummary:
    """Times of one rank: its traced steps, their seconds, and ``{kind: {name: (seconds, calls)}}``.

    Seconds of a feature are those inside its ranges, of an operator those outside the operators that it calls.
    """

    rank: int
    steps: tuple[int, ...]
    seconds: float
    times: Mapping[RowKind, Mapping[str, tuple[float, int]]]

    def to_json(self) -> dict[str, Any]:
        times: dict[str, Any] = {
            kind: {name: {"seconds": s, "calls": n} for name, (s, n) in self.times[kind].items()} for kind in KINDS
        }
        return {"rank": self.rank, "steps": list(self.steps), "seconds": self.seconds, **times}


def summarize_folder(folder: Path, features: Iterable[str]) -> list[RankSummary]:
    """Summarize every trace of a folder, by rank. Raises RunError with MS601 when there is none, or one cannot be read."""
    files = sorted(path for path in folder.rglob("*") if _RANK.search(path.name)) if folder.is_dir() else []
    if not files:
        text = f"the folder {folder} contains no trace, a file whose name ends in rank<N>.json.gz"
        fix = "give the folder where the profiler wrote its traces"
        raise RunError([Problem("MS601", text, where=str(folder), fix=advice(fix))])
    known = frozenset(features)
    return sorted((_read(path, known) for path in files), key=lambda summary: summary.rank)


def _read(path: Path, features: frozenset[str]) -> RankSummary:
    match = _RANK.search(path.name)
    rank = int(match[1]) if match else 0
    try:
        raw = path.read_bytes()
        data = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    except (OSError, EOFError, ValueError) as error:
        fix = Fix.advise("copy the trace again, or record a new one")
        raise RunError([Problem("MS601", f"the trace {path} cannot be read: {error}", where=str(path), fix=fix)]) from error
    return summarize(data["traceEvents"] if isinstance(data, dict) else data, features, rank)


def summarize(events: Sequence[Mapping[str, Any]], features: frozenset[str], rank: int = 0) -> RankSummary:
    """Summarize the events of one trace in Chrome's format, whose times are in microseconds."""
    complete = [event for event in events if event.get("ph") == "X"]
    steps = {int(match[1]): event["dur"] for event in complete if (match := _STEP.match(event["name"]))}
    times: dict[RowKind, dict[str, tuple[float, int]]] = {kind: {} for kind in KINDS}
    lines = defaultdict(list)
    for event in complete:
        if not _STEP.match(event["name"]):
            lines[event["pid"], event["tid"]].append(event)
    for line in lines.values():
        for event, inner, outer in _nested(line):
            name = event["name"]
            kind = _kind(event, features)
            if kind is None or (kind == "feature" and name in outer):
                continue
            seconds = (event["dur"] - (inner if kind == "operator" else 0)) / 1e6
            before = times[kind].get(name, (0.0, 0))
            times[kind][name] = (before[0] + seconds, before[1] + 1)
    ordered = {kind: dict(sorted(found.items(), key=lambda item: -item[1][0])) for kind, found in times.items()}
    return RankSummary(rank, tuple(sorted(steps)), sum(steps.values()) / 1e6, ordered)


def _kind(event: Mapping[str, Any], features: frozenset[str]) -> RowKind | None:
    name = event["name"]
    if name in features:
        return "feature"
    if _COLLECTIVE.match(name):
        return "collective"
    if _WAIT.search(name):
        return "wait"
    return "operator" if event.get("cat") in ("cpu_op", "kernel", "Kernel") else None


def _popped(stack: list[list[Any]]) -> tuple[Mapping[str, Any], float, frozenset[str]]:
    event, inner, around = stack.pop()
    return event, inner, around


def _nested(line: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], float, frozenset[str]]]:
    """Yield each event of a thread with the time of the operators directly inside it, and the names of those around it."""
    stack: list[list[Any]] = []  # event, time of inner operators, names around
    ordered = sorted(line, key=lambda event: (event["ts"], -event["dur"]))
    for event in ordered:
        while stack and event["ts"] >= stack[-1][0]["ts"] + stack[-1][0]["dur"]:
            yield _popped(stack)
        if event.get("cat") in ("cpu_op", "kernel", "Kernel"):
            for outer in reversed(stack):
                if outer[0].get("cat") == event.get("cat"):
                    outer[1] += event["dur"]
                    break
        around = stack[-1][2] | {stack[-1][0]["name"]} if stack else frozenset()
        stack.append([event, 0.0, around])
    while stack:
        yield _popped(stack)
