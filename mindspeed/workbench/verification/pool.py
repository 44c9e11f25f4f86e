"""A pool of worker processes that outlives single runs: the client of a broker, private or shared."""

from __future__ import annotations

import inspect
import os
import pickle
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any, Final

from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.problems.fixes import Fix
from mindspeed.problems.problem import Problem, RunError
from mindspeed.workbench.verification import baselines
from mindspeed.workbench.verification.job import Answer, WorkerCall
from mindspeed.workbench.verification.record import RankResult
from mindspeed.workbench.verification.shape import Recipe

_INHERITED: Final = ("MINDSPEED_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_", "TORCHELASTIC_")
_TRAINING: Final = str(Path(__file__).with_name("training.py"))
_DRY_RUN: Final = str(Path(__file__).with_name("dry_run.py"))
TIME_LIMIT: Final = 300.0
"""Seconds after which a run counts as stuck."""
END: Final = 10.0
"""Seconds that a broker gets to stop its workers."""


class SharedBroker:
    """A broker process for several pools, at ``address``. It ends with `close`, or with this process.

    Workers look for modules in ``search_path`` first, then where this process does. A run of more than ``time_limit`` seconds
    counts as stuck.
    """

    def __init__(self, search_path: Sequence[str] = (), time_limit: float = TIME_LIMIT) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mindspeed-pool-")
        self.address = str(Path(self._folder.name) / "broker")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_INHERITED)}
        path = os.pathsep.join((*search_path, *sys.path))
        fixed = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONPATH": path}
        with socket.socket(socket.AF_UNIX) as listener, (Path(self._folder.name) / "broker.log").open("wb") as log:
            listener.bind(self.address)
            listener.listen()
            words = [str(listener.fileno()), self._folder.name, str(time_limit)]
            command = [sys.executable, "-m", "mindspeed.workbench.verification.broker", *words]
            self._process = subprocess.Popen(
                command,
                env={**inherited, **fixed},
                pass_fds=[listener.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._connection = Client(self.address)

    def close(self) -> None:
        """End the broker and its workers and remove their files."""
        self._connection.close()
        try:
            self._process.wait(timeout=END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()


class WorkerPool:
    """Runs plans on as many processes as each needs, which start when they are first wanted.

    Results of baseline runs are kept: the same plan and recipe on the same number of processes run once.
    A job whose worker dies or hangs raises RunError, and the next one has other workers. ``address`` is that of a
    `SharedBroker`; without it the pool has a broker of its own, with this ``search_path`` and ``time_limit``.
    ``cpu_seconds`` is what the ranks of all jobs took, ``threads`` the most that a worker had after its last job,
    ``leftovers`` a line for each job that left process groups or many threads in a worker, which the broker replaced.
    """

    def __init__(self, search_path: Sequence[str] = (), address: str | None = None, time_limit: float = TIME_LIMIT) -> None:
        self._own = None if address else SharedBroker(search_path, time_limit)
        self._address = address or (self._own.address if self._own else "")
        self._connection = Client(self._address)
        self._folder = tempfile.TemporaryDirectory(prefix="mindspeed-stores-")
        self._runs = 0
        self._kept: dict[tuple[str, Recipe, int], list[RankResult]] = {}
        self.cpu_seconds = 0.0
        self.threads = 0
        self.leftovers: list[str] = []

    def run(
        self, plan: ActivationPlan, recipe: Recipe, world_size: int, baseline: Sequence[RankResult] = ()
    ) -> list[RankResult]:
        """The record of every rank; routers choose as in ``baseline``. Raises RunError when a worker fails, dies or hangs."""
        choices = [choice for record in baseline for choice in record.choices]
        return self._work(_TRAINING, "train", world_size, (recipe, choices), plan)

    def measure(self, plan: ActivationPlan, recipe: Recipe, world_size: int) -> list[tuple[int, int]]:
        """The bytes that each rank keeps of a micro-batch, and has at the peak of a step. Raises RunError as `run` does."""
        return self._work(_TRAINING, "measure", world_size, (recipe,), plan)

    def dry_run(self, plan: ActivationPlan, recipe: Recipe) -> list[tuple[int, int]]:
        """The result of `measure`, for the first rank of each pipeline stage of a job of any size: one process, no contents.

        Raises RunError as `run` does, and where a feature reads what a tensor contains.
        """
        ranks, stages = int(plan.world.world_size), plan.world.pp
        data, arguments = plan.to_json(), pickle.dumps((recipe,))
        found = []
        for rank in range(0, ranks, ranks // stages):
            job = WorkerCall(_DRY_RUN, "measure", arguments, rank, ranks, "", data, alone=True)
            found += self._send([job], f"a dry run of rank {rank}")
        return found

    def call(
        self, function: Callable[..., Any], world_size: int, *arguments: Any, plan: ActivationPlan | None = None
    ) -> list[Any]:
        """The results of a top-level function on every rank of a gloo job, by rank. Raises RunError as `run` does.

        Under ``plan`` the platform's layer and Megatron's groups are there as well.
        """
        return self._work(inspect.getfile(function), function.__qualname__, world_size, arguments, plan)

    def run_once(self, plan: ActivationPlan, recipe: Recipe, world_size: int) -> list[RankResult]:
        """As `run`, but an equal run made before, here or by another process, gives its records again."""
        key = (plan.digest, recipe, world_size)
        if key not in self._kept:
            found = baselines.load(plan, recipe, world_size)
            self._kept[key] = self.run(plan, recipe, world_size) if found is None else found
            if found is None:
                baselines.store(plan, recipe, world_size, self._kept[key])
        return self._kept[key]

    def _work(
        self, file: str, name: str, world_size: int, arguments: tuple[Any, ...], plan: ActivationPlan | None
    ) -> list[Any]:
        """Have a function of a file called by as many workers and wait for all results."""
        self._runs += 1
        store = str(Path(self._folder.name) / f"store-{self._runs}")
        data, sent = plan.to_json() if plan is not None else None, pickle.dumps(arguments)
        jobs = [WorkerCall(file, name, sent, rank, world_size, store, data) for rank in range(world_size)]
        return self._send(jobs, f"{name} with {', '.join(plan.names) or 'no features'}" if plan is not None else name)

    def _send(self, jobs: list[WorkerCall], title: str) -> list[Any]:
        """Have jobs done by one worker each and wait for all results."""
        try:
            self._connection.send(jobs)
            answers: list[Answer] | Problem = self._connection.recv()
        except (EOFError, OSError) as error:
            text = f"the process that starts the verification ranks has ended: {error}"
            raise RunError([Problem("MS604", text, fix=Fix.advise("run the command again"))]) from None
        except BaseException:  # Ctrl-C or a time limit: the answer of this run is not that of the next
            left, self._connection = self._connection, Client(self._address)
            left.close()
            raise
        if isinstance(answers, Problem):
            raise RunError([answers])
        self.cpu_seconds += sum(answer.cpu_seconds for answer in answers)
        self.threads = max(answer.threads for answer in answers)
        leftovers = [(rank, answer.leftover) for rank, answer in enumerate(answers) if answer.leftover]
        self.leftovers += [f"{title} left {leftover} in rank {rank}" for rank, leftover in leftovers]
        return [pickle.loads(answer.outcome) for answer in answers if isinstance(answer.outcome, bytes)]

    def close(self) -> None:
        """Leave the broker, which ends the workers of an own one, and remove the pool's files."""
        self._connection.close()
        if self._own is not None:
            self._own.close()
        self._folder.cleanup()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
