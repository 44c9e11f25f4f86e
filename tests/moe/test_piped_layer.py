"""A layer in units: what it hides, keeps and computes, and the order of its transfers both ways."""

import json
from itertools import groupby
from pathlib import Path

import pytest
import torch

from mindspeed.features.deepspeed_moe.units import Step, schedule
from mindspeed.workbench.verification.pool import WorkerPool
from tests.moe import piped
from tests.moe.piped import Measured, Run, plan
from tests.moe.test_units import flat

KINDS = {"gather": "all_gather_into_tensor", "scatter": "reduce_scatter_tensor"}
MIRRORED = {"dispatch": "dispatch", "gather": "scatter", "scatter": "gather", "return": "return"}
UNITS = [(2, 2), (2, 3), (4, 1), (4, 2)]
"""Experts on two ranks, and parts: 2, 3, 2 and 4 units of a rank."""


def measure(runs: list[Run]) -> list[Measured]:
    return piped.measure(runs)


@pytest.mark.long
@pytest.mark.parametrize(("tp", "streams"), [(1, False), (2, False), (2, True)])
def test_not_hidden_time_falls_with_the_units(pool: WorkerPool, tp: int, streams: bool) -> None:
    cases = [(Run(experts), Run(experts, parts, streams), Run(experts, parts, streams, early=True)) for experts, parts in UNITS]
    for rank in pool.call(measure, 2 * tp, [run for case in cases for run in case], plan=plan(tp)):
        for number, (experts, parts) in enumerate(UNITS):
            plain, units, early = rank[3 * number : 3 * number + 3]
            goal = 1.3 / (experts // 2 * parts) * plain.exposed
            assert units.exposed <= goal < early.exposed
            assert units.kept <= 1.02 * plain.kept
            for ours, theirs in zip(units.values, plain.values, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)


@pytest.mark.long
@pytest.mark.parametrize(("tp", "waits"), [(1, 16), (2, 32)])
def test_no_wait_is_missing_and_each_is_needed(pool: WorkerPool, tp: int, waits: int) -> None:
    skipped = [Run(parts=2, skip=number) for number in range(waits)]
    ranks = pool.call(measure, 2 * tp, [Run(parts=2), *skipped], plan=plan(tp, poison=True))
    for whole, *spoiled in ranks:
        assert whole.waits == waits
        assert all(value.isfinite().all() for value in whole.values)
        assert not any(all(value.isfinite().all() for value in run.values) for run in spoiled)


@pytest.mark.long
@pytest.mark.parametrize(("tp", "streams"), [(1, False), (2, False), (2, True)])
def test_posts_and_waits_follow_the_schedule_both_ways(pool: WorkerPool, tmp_path: Path, tp: int, streams: bool) -> None:
    cases = [(2, 1), *UNITS]
    runs = [Run(experts, parts, streams, tokens=20) for experts, parts in cases]  # 25 or 13 places
    pool.call(measure, 2 * tp, runs, plan=plan(tp, collective_log=str(tmp_path / "log")))
    for rank in range(2 * tp):
        wanted = [expected(schedule(experts // 2 * parts, gathers=tp > 1, one_group=streams)) for experts, parts in cases]
        assert transfers(tmp_path / f"log.{rank}") == wanted


def transfers(log: Path) -> list[list[str]]:
    """Launches and waits of each run, each launch numbered among those of its kind and run."""
    events = [json.loads(line) for line in log.read_text().splitlines()]
    kinds = {event["id"]: event["kind"] for event in events if event["event"] == "launch"}
    events = [event for event in events if event["event"] in ("launch", "wait")]
    runs = [list(run) for ends, run in groupby(events, lambda event: kinds[event["id"]] == "all_reduce") if not ends]
    return [_numbered([(event["event"], kinds[event["id"]], event["id"]) for event in run]) for run in runs]


def expected(steps: list[Step]) -> list[str]:
    """Launches and waits of forward and of backward, which runs the steps in reverse order."""
    there = [step for step in flat(steps) if step.act in ("post", "wait")]
    turned = {"post": "wait", "wait": "post"}
    back = [step._replace(act=turned[step.act], leg=MIRRORED[step.leg]) for step in reversed(there)]  # type: ignore[arg-type]
    events = {"post": "launch", "wait": "wait"}
    order = [(way, step) for way, part in enumerate((there, back)) for step in part]
    return _numbered(
        [(events[step.act], KINDS.get(step.leg, "all_to_all_single"), (way, step.leg, step.unit)) for way, step in order]
    )


def _numbered(events: list[tuple[str, str, object]]) -> list[str]:
    names: dict[object, str] = {}
    counts: dict[str, int] = {}
    for event, kind, key in events:
        if event == "launch":
            counts[kind] = counts.get(kind, 0) + 1
            names[key] = f"{kind} {counts[kind]}"
    return [f"{event} {names[key]}" for event, _, key in events]
