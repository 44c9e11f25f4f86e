"""A pool of worker processes that outlives single runs: the client of a broker, private or shared."""

from __future__ import annotations

import hashlib
import inspect
import io
import os
import pickle
import platform
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any, Final

import mindspeed
from mindspeed.engine.inspection.megatron_copies import megatron_version
from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.files.cache_folder import cache_folder, distrust, make_private, remove_oldest
from mindspeed.problems import Fix, Problem, RunError
from mindspeed.workbench.verification.job import Answer, WorkerCall
from mindspeed.workbench.verification.record import RankResult
from mindspeed.workbench.verification.shape import Recipe

KEPT: Final = 200
"""Files that stay; the least recently written ones are removed."""
_PARTS: Final = {
    "mindspeed.workbench.verification.record": ("RankResult", "TensorShard", "RoutingChoice"),
    "mindspeed.memory.byte_count": ("Bytes",),
    "builtins": ("slice", "Ellipsis"),
    "numpy": ("ndarray", "dtype"),
    "numpy.core.multiarray": ("_reconstruct", "scalar"),
    "numpy.core.numeric": ("_frombuffer",),
}
"""Names of what results are made of, by module."""
_VARIABLES: Final = ("MINDSPEED_OPS", "MINDSPEED_DISABLE")


def load(plan: ActivationPlan, recipe: Recipe, world_size: int) -> list[RankResult] | None:
    """The kept result of an equal run, or None."""
    if not _can_be_kept(plan):
        return None
    file = _file(plan, recipe, world_size)
    if distrust(file, cache_folder()) is not None:
        return None
    try:
        results: list[RankResult] = _Reader(io.BytesIO(file.read_bytes())).load()
    except (OSError, pickle.UnpicklingError, EOFError):
        return None
    return results


def store(plan: ActivationPlan, recipe: Recipe, world_size: int, results: list[RankResult]) -> None:
    """Keep a result, whole or not at all; where the folder cannot be written nothing is kept."""
    if not _can_be_kept(plan):
        return
    file = _file(plan, recipe, world_size)
    if distrust(file, cache_folder()) is not None:
        return
    with suppress(OSError):
        make_private(file.parent)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as new:
            new.write(pickle.dumps(results))
        os.replace(new.name, file)
        remove_oldest(file.parent.iterdir(), KEPT)


class _Reader(pickle.Unpickler):
    """Read results and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _PARTS.get(module.replace("numpy._core", "numpy.core"), ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"the file names {module}.{name}, which no result contains")


def _can_be_kept(plan: ActivationPlan) -> bool:
    """Return whether the fingerprint has the sources of all features, and the results are those of the processor."""
    return plan.environment["platform"] == "cpu" and all(p.distribution == "mindspeed" for p in plan.features)


def _file(plan: ActivationPlan, recipe: Recipe, world_size: int) -> Path:
    key = repr((plan.digest, recipe, world_size, _fingerprint(), [os.environ.get(name) for name in _VARIABLES]))
    return cache_folder() / "baselines" / hashlib.sha256(key.encode()).hexdigest()[:32]


@cache
def _fingerprint() -> str:
    """A digest of the versions of packages, of every source file of mindspeed and of the processor."""
    versions = (version("torch"), version("numpy"), megatron_version())
    digest = hashlib.sha256(repr((versions, platform.platform(), _processor())).encode())
    root = Path(mindspeed.__file__).parent
    for file in sorted(root.rglob("*.py")):
        digest.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def _processor() -> str:
    """Model and instructions, by which kernels and so the bits of results are chosen."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


_INHERITED: Final = ("MINDSPEED_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_", "TORCHELASTIC_")
_TRAINING: Final = str(Path(__file__).with_name("training.py"))
_DRY_RUN: Final = str(Path(__file__).with_name("dry_run.py"))
_SHADOW: Final = str(Path(__file__).with_name("shadow.py"))
_BROKER: Final = "from mindspeed.workbench.verification.broker import main; main()"
"""Not a module that is run: multiprocessing would run that anew in each worker."""
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
        fixed["PYTHONSAFEPATH"] = "1"  # the current folder may be a checkout of MindSpeed, whose package has this name too
        with socket.socket(socket.AF_UNIX) as listener, (Path(self._folder.name) / "broker.log").open("wb") as log:
            listener.bind(self.address)
            listener.listen()
            words = [str(listener.fileno()), self._folder.name, str(time_limit)]
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BROKER, *words],
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

    def judge(self, plan: ActivationPlan, recipe: Recipe, world_size: int) -> list[Any]:
        """The calls of operators of each rank, judged by the kernels of other devices. Raises RunError as `run` does."""
        return self._work(_SHADOW, "judge", world_size, (recipe,), plan)

    def dry_run(self, plan: ActivationPlan, recipe: Recipe) -> list[tuple[int, int]]:
        """The result of `measure`, for the first rank of each pipeline stage of a job of any size: one process, no contents.

        Raises RunError as `run` does, and where a feature reads what a tensor contains.
        """
        ranks, stages = int(plan.world.world_size), plan.world.pp
        found: list[tuple[int, int]] = self.call_alone(
            _DRY_RUN, "measure", range(0, ranks, ranks // stages), ranks, recipe, plan=plan
        )
        return found

    def call_alone(
        self,
        file: str,
        name: str,
        ranks: Iterable[int],
        world_size: int,
        *arguments: Any,
        plan: ActivationPlan | None = None,
    ) -> list[Any]:
        """The results of a function of a file on some ranks of a job, one after the other; the other ranks are missing.

        Under ``plan`` the platform's layer and Megatron's groups are there as well. Raises RunError as `run` does.
        """
        sent, data = pickle.dumps(arguments), plan.to_json() if plan is not None else None
        found = []
        for rank in ranks:
            call = WorkerCall(file, name, sent, rank, world_size, "", data, alone=True)
            found += self._send([call], f"{name} of rank {rank} alone")
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
            found = load(plan, recipe, world_size)
            self._kept[key] = self.run(plan, recipe, world_size) if found is None else found
            if found is None:
                store(plan, recipe, world_size, self._kept[key])
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
