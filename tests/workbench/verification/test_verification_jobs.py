"""Jobs of the proof harness's workers leave nothing behind that the next ones would pay for."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from mindspeed import plan
from mindspeed.problems import RunError
from mindspeed.workbench.verification.case import build_case
from mindspeed.workbench.verification.pool import WorkerPool
from mindspeed.workbench.verification.shape import GPT, Recipe

TASKS = Path("/proc/self/task")
TWENTY = [("rms-norm", 20), ("tensor-parallel", 20)]


def trained_once() -> None:
    """A model of its own, whose layers know Megatron's sixteen groups."""
    import torch
    from megatron.core import tensor_parallel

    from mindspeed.workbench.verification.model import build_chunks

    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    (chunk,) = build_chunks(Recipe(GPT))
    tokens = torch.zeros(1, GPT.seq_length, dtype=torch.int64)
    hidden = torch.ones(1, 1, GPT.seq_length, GPT.seq_length, dtype=torch.bool).triu(1)
    chunk.remembered = chunk(tokens, tokens, hidden, labels=tokens)  # a circle through nodes of autograd
    chunk.remembered.sum().backward()


def loops_of_gloo() -> int:
    """Threads of this process that serve a process group."""
    return sum((task / "comm").read_text().startswith("gloo_tcp_loop") for task in TASKS.iterdir())


@pytest.mark.skipif(not TASKS.exists(), reason="threads are counted in /proc, which is Linux's")
def test_a_model_that_a_job_made_keeps_no_process_groups_alive(pool: WorkerPool) -> None:
    for _ in range(3):
        pool.call(trained_once, 1, plan=plan(platform="cpu", level=0))
        assert pool.threads <= 8
    (loops,) = pool.call(loops_of_gloo, 1)
    assert loops <= 1  # of the job that counts, whose group may start it later


@pytest.mark.skipif(not TASKS.exists(), reason="threads are counted in /proc, which is Linux's")
@pytest.mark.parametrize(
    ("feature", "jobs"), [("rms-norm", 3), *(pytest.param(*case, marks=pytest.mark.long) for case in TWENTY)]
)
def test_a_worker_has_at_most_eight_threads_after_many_jobs(pool: WorkerPool, feature: str, jobs: int) -> None:
    case = build_case([feature])
    for _ in range(jobs):
        pool.run(case.plan, replace(case.recipe, steps=1), case.plan.world.world_size)
    assert 0 < pool.threads <= 8


@pytest.mark.skipif(not TASKS.exists(), reason="threads are counted in /proc, which is Linux's")
def test_auxiliary_losses_of_experts_keep_no_process_group_alive(pool: WorkerPool) -> None:
    case = build_case(["expert-parallel"])
    pool.run(case.baseline, replace(case.recipe, steps=1), 1)
    assert pool.leftovers == []


def scale_a_loss_alone() -> None:
    """Send a gradient through an added loss without a schedule, which would have set its scale."""
    import torch
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    MoEAuxLossAutoScaler.apply(torch.ones(2, requires_grad=True), torch.ones((), requires_grad=True)).sum().backward()


def test_a_job_with_an_added_loss_leaves_no_scale_for_the_next_one(pool: WorkerPool) -> None:
    case = build_case(["expert-parallel"])
    pool.call(scale_a_loss_alone, 1, plan=plan(platform="cpu", level=0))
    assert pool.run(case.baseline, replace(case.recipe, steps=1), 1)


def rank_1_counts_another_group() -> None:
    """As after a group that one rank could not make: the names of the next groups differ between the ranks."""
    import torch.distributed as dist

    if dist.get_rank() == 1:
        dist.destroy_process_group()
        dist.distributed_c10d._world.group_count = 1
        dist.destroy_process_group = lambda: None
        raise RuntimeError("a planted error")


def keep_a_group() -> None:
    """Leave three process groups with their threads behind."""
    import torch.distributed as dist

    for _ in range(3):
        kept.append(dist.new_group())
        dist.barrier(kept[-1])


kept: list[Any] = []


def left_by(job: Callable[[], None], pool: WorkerPool) -> list[str]:
    """What a job leaves behind, which is then no more held against this test."""
    pool.call(job, 1)
    left = pool.leftovers.copy()
    pool.leftovers.clear()
    return left


@pytest.mark.skipif(not TASKS.exists(), reason="threads are counted in /proc, which is Linux's")
def test_a_job_that_leaves_a_process_group_is_named_and_its_worker_is_replaced(pool: WorkerPool) -> None:
    assert left_by(keep_a_group, pool) == ["keep_a_group left 3 process groups in rank 0"]
    (loops,) = pool.call(loops_of_gloo, 1)
    assert loops <= 1  # of the job that counts


def test_ranks_of_a_failed_job_are_not_used_again(pool: WorkerPool) -> None:
    with pytest.raises(RunError, match="MS607 verification rank 1 failed: RuntimeError: a planted error"):
        pool.call(rank_1_counts_another_group, 2)
    assert len(pool.call(loops_of_gloo, 2)) == 2


def lives(pid: int) -> bool:
    """Whether a process runs; one that has ended may wait for its parent."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def start_a_process(file: str, die: bool) -> None:
    """Start a process that outlives the job, which fails or takes its worker with it."""
    process = subprocess.Popen(["sleep", "60"])
    Path(file).write_text(str(process.pid), encoding="utf-8")
    if die:
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("a planted error")


@pytest.mark.parametrize("die", [False, True])
def test_processes_that_a_failed_job_started_end_with_its_worker(pool: WorkerPool, tmp_path: Path, die: bool) -> None:
    file = tmp_path / "pid"
    with pytest.raises(RunError):
        pool.call(start_a_process, 1, str(file), die)
    end = time.monotonic() + 5
    while lives(int(file.read_text())):
        assert time.monotonic() < end
        time.sleep(0.01)


def drawn_on_the_host() -> tuple[bool, int]:
    """Return whether filling a host tensor leaves the device's generator alone, and how many modes see every operator."""
    import torch

    before = torch.cuda.get_rng_state()
    torch.nn.init.normal_(torch.empty(3))
    return torch.equal(before, torch.cuda.get_rng_state()), torch._C._len_torch_dispatch_stack()


def test_a_job_with_a_log_of_collectives_draws_as_one_without_and_leaves_no_mode_behind(
    pool: WorkerPool, tmp_path: Path
) -> None:
    """A mode that stayed made later jobs of one rank fill host tensors from the device's generator."""
    settings = {"device-emulation": {"collective_log": str(tmp_path / "log.{rank}")}}
    logged = plan(platform="cpu", settings=settings, world={"world_size": 1})
    assert pool.call(drawn_on_the_host, 1, plan=logged) == [(True, 1)]
    assert pool.call(drawn_on_the_host, 1, plan=plan(platform="cpu", world={"world_size": 1})) == [(True, 0)]


def stay_in_a_mode() -> None:
    """Leave a mode that sees every operator of the worker's thread."""
    from torch.utils._python_dispatch import TorchDispatchMode

    TorchDispatchMode().__enter__()


def test_a_job_that_leaves_a_mode_is_named_and_its_worker_is_replaced(pool: WorkerPool) -> None:
    assert left_by(stay_in_a_mode, pool) == ["stay_in_a_mode left 1 dispatch modes in rank 0"]
    assert pool.call(drawn_on_the_host, 1, plan=plan(platform="cpu", world={"world_size": 1})) == [(True, 0)]


def echo(value: int, seconds: float) -> int:
    time.sleep(seconds)
    return value


class TimeIsOverError(Exception):
    """A test's time is over."""


def test_the_answer_of_an_interrupted_job_is_not_taken_for_the_next_ones(pool: WorkerPool) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise TimeIsOverError

    pool.call(echo, 1, 0, 0.0)
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(TimeIsOverError):
            pool.call(echo, 1, 1, 0.6)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert pool.call(echo, 1, 2, 0.0) == [2]


def own_process() -> int:
    return os.getpid()


@pytest.mark.long
@pytest.mark.skipif(not TASKS.exists(), reason="only Linux tells a process that its parent has ended")
def test_workers_end_with_a_broker_that_a_signal_ended() -> None:
    pool = WorkerPool()
    try:
        workers = pool.call(own_process, 2)
        (broker,) = set(psutil.Process().children()) & set(psutil.Process(workers[0]).parents())
        broker.kill()
        end = time.monotonic() + 5
        while any(map(lives, workers)):
            assert time.monotonic() < end
            time.sleep(0.01)
    finally:
        pool.close()


def own_command() -> str:
    return " ".join(psutil.Process().cmdline())


@pytest.mark.long
def test_workers_are_fresh_interpreters_where_the_fork_server_has_a_second_thread(tmp_path: Path) -> None:
    thread = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    (tmp_path / "sitecustomize.py").write_text(thread, encoding="utf-8")
    with WorkerPool([str(tmp_path)]) as pool:
        commands = pool.call(own_command, 2)
    assert ["spawn_main" in command for command in commands] == [True, True]
