"""A pool of worker processes that outlives single runs, because starting one costs far more than a run."""

from __future__ import annotations

import inspect
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from mindspeed.planning.plan import ActivationPlan
from mindspeed.plugins.problems import Problem, RunError
from mindspeed.verification.job import Call, Failure, Job
from mindspeed.verification.record import RankResult
from mindspeed.verification.shape import Recipe

TIME_LIMIT: Final = 300.0
"""Seconds after which a run counts as stuck; the first one imports torch and Megatron."""
GRACE: Final = 15.0
"""Seconds that the other workers get to end their job after one has failed."""
_INHERITED: Final = ("MINDSPEED_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_", "TORCHELASTIC_")


@dataclass(slots=True)
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection[Job | Call, Any]
    log: Path


class WorkerPool:
    """Runs plans on as many processes as each needs, starting workers when they are first wanted.

    Results of baseline runs are kept: the same plan and recipe on the same number of processes run once.
    A worker that dies or hangs ends the pool: every later call raises the same RunError. Workers look for modules in
    ``search_path`` first, then where this process does.
    """

    def __init__(self, search_path: Sequence[str] = ()) -> None:
        self._search_path = (*search_path, *sys.path)
        self._folder = tempfile.TemporaryDirectory(prefix="mindspeed-pool-")
        self._workers: list[_Worker] = []
        self._runs = 0
        self._kept: dict[tuple[str, Recipe, int], list[RankResult]] = {}
        self.ended: RunError | None = None

    def run(self, plan: ActivationPlan, recipe: Recipe, world_size: int) -> list[RankResult]:
        """The record of every rank. Raises RunError when a worker fails, dies or hangs."""
        data = plan.to_json()
        records: list[RankResult] = self._work(world_size, lambda rank, store: Job(data, recipe, rank, world_size, store))
        return records

    def call(
        self, function: Callable[..., Any], world_size: int, *arguments: Any, plan: ActivationPlan | None = None
    ) -> list[Any]:
        """The results of a top-level function on every rank of a gloo job, by rank. Raises RunError as `run` does.

        Under ``plan`` the platform's layer and Megatron's groups are there as well.
        """
        file, name, data = inspect.getfile(function), function.__qualname__, plan.to_json() if plan is not None else None
        sent = pickle.dumps(arguments)
        results = self._work(world_size, lambda rank, store: Call(file, name, sent, rank, world_size, store, data))
        return [pickle.loads(result) for result in results]

    def _work(self, world_size: int, job: Callable[[int, str], Job | Call]) -> list[Any]:
        """Send ``job(rank, store)`` to as many workers and wait for all results."""
        if self.ended is not None:
            raise self.ended
        self._start(world_size)
        self._runs += 1
        store = str(Path(self._folder.name) / f"store-{self._runs}")
        team = self._workers[:world_size]
        for rank, worker in enumerate(team):
            try:
                worker.connection.send(job(rank, store))
            except OSError:
                raise self._end(self._death(rank)) from None
        return self._collect(team)

    def run_once(self, plan: ActivationPlan, recipe: Recipe, world_size: int) -> list[RankResult]:
        """As `run`, but an equal run made before gives its records again."""
        key = (plan.digest, recipe, world_size)
        if key not in self._kept:
            self._kept[key] = self.run(plan, recipe, world_size)
        return self._kept[key]

    def close(self) -> None:
        """End the workers and remove the pool's files."""
        for worker in self._workers:
            worker.connection.close()
            worker.process.kill()
            worker.process.wait()
        self._workers.clear()
        self._folder.cleanup()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _start(self, count: int) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_INHERITED)}
        fixed = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONPATH": os.pathsep.join(self._search_path)}
        while len(self._workers) < count:
            ours, theirs = Pipe()
            log = Path(self._folder.name) / f"worker-{len(self._workers)}.log"
            command = [sys.executable, "-m", "mindspeed.verification.worker", str(theirs.fileno())]
            with log.open("wb") as output:
                process = subprocess.Popen(
                    command,
                    env={**inherited, **fixed},
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            theirs.close()
            self._workers.append(_Worker(process, ours, log))

    def _collect(self, team: Sequence[_Worker]) -> list[Any]:
        results: dict[int, Any] = {}
        end = time.monotonic() + TIME_LIMIT
        waiting: dict[object, int] = {worker.connection: rank for rank, worker in enumerate(team)}
        while waiting:
            ready = wait([team[rank].connection for rank in waiting.values()], timeout=max(0.0, end - time.monotonic()))
            if not ready:
                raise self._end(self._stuck(results, sorted(waiting.values())))
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    result = results[rank] = team[rank].connection.recv()
                except (EOFError, OSError):
                    raise self._end(self._death(rank)) from None
                if isinstance(result, Failure):
                    end = min(end, time.monotonic() + GRACE)
        failures = {rank: result for rank, result in results.items() if isinstance(result, Failure)}
        if failures:
            raise RunError([_problem(rank, failure) for rank, failure in sorted(failures.items())[:1]])
        return [result for _, result in sorted(results.items())]

    def _stuck(self, results: Mapping[int, Any], waiting: Sequence[int]) -> Problem:
        for rank, result in sorted(results.items()):
            if isinstance(result, Failure):
                return _problem(rank, result)
        ranks = ", ".join(map(str, waiting))
        return Problem(
            "MS604", f"verification ranks {ranks} did not answer for {TIME_LIMIT:.0f} s", chain=self._tail(waiting[0])
        )

    def _death(self, rank: int) -> Problem:
        status = self._workers[rank].process.wait()
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        return Problem("MS604", f"verification rank {rank} ended with {how}; the others were stopped", chain=self._tail(rank))

    def _tail(self, rank: int) -> tuple[str, ...]:
        return tuple(self._workers[rank].log.read_text(errors="replace").splitlines()[-5:])

    def _end(self, problem: Problem) -> RunError:
        self.ended = RunError([problem])
        self.close()
        return self.ended


def _problem(rank: int, failure: Failure) -> Problem:
    return Problem(
        "MS607", f"verification rank {rank} failed: {failure.message}", chain=tuple(failure.traceback.splitlines()[-6:])
    )
