"""Hangs of one of two ranks: which rank the logs name, in which section, at which line, and how the ranks end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mindspeed.features.resiliency.feature import ResiliencyArgs
from mindspeed.features.resiliency.heartbeat import Heartbeat
from mindspeed.features.resiliency.rank_state import RankState, problem_of
from tests.features.resiliency import faults
from tests.forked_ranks import run_ranks
from tests.workbench.training.conftest import log

TIMEOUT = 2.5


def stop_process() -> None:
    subprocess.Popen(["sh", "-c", f"sleep 60; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def start_collective() -> None:
    import torch

    torch.distributed.all_reduce(torch.ones(7), group=groups[0])


def wait_for_data() -> None:
    with heartbeat.section("data"):
        time.sleep(60)


heartbeat = Heartbeat()
groups: list[Any] = []
HANGS: dict[str, tuple[Callable[[], None], str]] = {
    "stopped process": (stop_process, r"MS620 rank 1 hung: no heartbeat while the other ranks wait\n"),
    "endless collective": (start_collective, r"MS620 the ranks hung: they wait in different collectives\n"),
    "dead data loader": (wait_for_data, r"MS620 rank 1 hung in data of step 2 while the other ranks wait in a collective\n"),
}


def train(fault: Callable[[], None], run: Path, level: str, rank: int) -> int:
    """Train three steps, each with an all-reduce; rank 1 fails in the second one."""
    import torch
    import torch.distributed as dist

    from mindspeed.features.resiliency.watch import Watch
    from mindspeed.process.run import set_run_folder

    set_run_folder(run)
    dist.init_process_group("gloo")
    groups.append(dist.new_group())
    watch = Watch(heartbeat, ResiliencyArgs.model_validate({"timeout": TIMEOUT, "level": level}))
    for step in (1, 2, 3):
        heartbeat.step = step
        with heartbeat.section("step"):
            if step == 2 and dist.get_rank() == 1:
                fault()
            dist.all_reduce(torch.ones(3))
    watch.stop()
    dist.barrier()
    return 0


@pytest.mark.parametrize(
    "fault", ["stopped process", *(pytest.param(name, marks=pytest.mark.long) for name in HANGS if name != "stopped process")]
)
def test_the_log_names_the_rank_that_hangs(tmp_path: Path, fault: str) -> None:
    act, named = HANGS[fault]
    statuses = run_ranks(2, partial(train, act, tmp_path, "restart"), 60, grace=8.0)
    logs = [(tmp_path / "logs" / f"rank{rank}.log").read_text() for rank in range(2)]
    assert len(re.findall(named, "".join(logs))) == 1, logs
    first = logs["MS620" in logs[1]]
    assert re.search(r"  because: rank 0: step 2, step, at .*test_hangs\.py:\d+ in train; waits in gloo:all_reduce", first)
    assert re.search(r"most recent call first.*test_hangs\.py\", line \d+ in train", logs[0], re.DOTALL)
    assert 75 in statuses.values()


@pytest.mark.long
def test_a_rank_that_goes_on_is_reported_and_the_job_ends_well(tmp_path: Path) -> None:
    def pause() -> None:
        subprocess.Popen(["sh", "-c", f"sleep {10 * TIMEOUT}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)

    statuses = run_ranks(2, partial(train, pause, tmp_path, "report"), 60)
    assert statuses == {0: 0, 1: 0}
    first, second = ((tmp_path / "logs" / f"rank{rank}.log").read_text() for rank in range(2))
    assert "MS620 rank 1 hung" in first
    assert "rank 0: the training loop goes on" in first
    assert re.search(r"rank 1: this process did not run for \d+ s", second)


WAITING = RankState(7, "backward", 9.0, "node0", 11, "", "nccl:all_reduce number 5 of group dp", True, "a.py:1 in f")


def message(**states: RankState) -> str:
    return problem_of(dict(enumerate(states.values())), len(states), "run/logs/rank0.log").message


def test_the_ranks_that_lag_are_those_that_do_not_wait() -> None:
    loading = replace(WAITING, section="data", pending=False)
    assert (
        message(a=WAITING, b=loading, c=WAITING) == "rank 1 hung in data of step 7 while the other ranks wait in a collective"
    )
    assert message(a=loading) == "rank 0 hung in data of step 7"
    assert message(a=WAITING, b=WAITING).startswith("all ranks hung in the same collective")
    assert message(a=WAITING, b=replace(WAITING, collective="nccl:recv number 2 of group pp")) == (
        "the ranks hung: they wait in different collectives"
    )
    assert message(a=WAITING, b=replace(loading, responds=False)) == "rank 1 hung: no heartbeat while the other ranks wait"


def test_equal_ranks_are_one_line() -> None:
    problem = problem_of({0: WAITING, 1: WAITING, 2: WAITING}, 4, "log")
    assert problem.message == "rank 3 hung: no heartbeat while the other ranks wait"
    assert problem.chain == ("ranks 0-2: step 7, backward, at a.py:1 in f; waits in nccl:all_reduce number 5 of group dp",)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", faults.FAULTS)
def test_a_training_job_prints_what_the_page_shows_of_a_fault(tmp_path: Path, name: str) -> None:
    status, text = faults.run(faults.FAULTS[name], tmp_path)
    pages = {name: block for _, name, block, _ in faults.MARKED.findall(faults.PAGE.read_text(encoding="utf-8"))}
    assert status == (0 if "NaN" in name else 75), text
    printed, page = (re.sub(r"[\d.,:]+", "N", block).splitlines() for block in (faults.shown(text, tmp_path), pages[name]))
    assert printed[:1] == page[:1]
    assert any("rejected" in line for line in printed) == ("NaN" in name)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_rollback_returns_to_the_newest_checkpoint_and_goes_on_behind_the_data(tmp_path: Path) -> None:
    status, text = faults.run(faults.ROLLBACK, tmp_path)
    assert status == 0, text
    rows = log(tmp_path / "runs" / "job")
    steps = [row["step"] for row in rows if "loss" in row]
    assert steps == [1, 2, 3, 4, 5, 6, 6, 7, 8, 9, 10]
    assert [row["step"] for row in rows if "action" in row] == [7]


def test_the_only_rank_of_a_job_is_the_slowest_and_asks_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    heartbeat = Heartbeat()
    with heartbeat.section("step"), heartbeat.section("forward"):
        pass
    assert heartbeat.slowest_rank() == {}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(dist, "all_reduce", lambda *_: pytest.fail("a collective of one rank"))
        heartbeat.add_work(0.5)
        assert heartbeat.slowest_rank() == {"slowest_rank": 0, "slowest_seconds": 0.5}
    finally:
        dist.destroy_process_group()
