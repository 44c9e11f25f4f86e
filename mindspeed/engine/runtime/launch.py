"""Starting the processes of a job, with torchrun underneath, or joining a job that already runs.

Light until `launch` is called: deciding whether to start or to join imports no torch.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import stat
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from mindspeed.engine.runtime import parent_process, rendezvous
from mindspeed.problems import Problem, RunError, advice
from mindspeed.process import error_file
from mindspeed.process.run import UNFINISHED

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

SIGNALLED: Final = 128
"""Added to the number of a signal, the exit status of what the signal ended."""
INTERRUPTED: Final = SIGNALLED + signal.SIGINT
"""Exit status of a job that Ctrl-C stopped."""
UNWRITTEN: Final = 120
"""Exit status of Python where the last output cannot be written."""
SAVING_TIME: Final = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Environment variable: seconds that torchrun leaves processes to save and end after a signal; its default is 30."""
_SECONDS_TO_SAVE: Final = "600"
_HANDLED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
"""Signals of which the first is handed on to the processes."""
_SLURM: Final = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID")


class JobError(RunError):
    """A process of a job ended early. ``status`` is its exit status, 128 + the signal for one that was killed."""

    def __init__(self, problems: Iterable[Problem], status: int = 1) -> None:
        super().__init__(problems)
        self.status = status


def launch(command: Sequence[str], nproc: int, env: Mapping[str, str], passthrough: Sequence[str] = ()) -> int:
    """Run ``command`` in ``nproc`` processes of this node and wait for them.

    ``env`` is added to their environment; ``passthrough`` holds torchrun's own options for several nodes
    (``--nnodes 2 --node-rank 1 --master-addr ...``). Returns 0, or 128 + the number of a signal, which the
    processes received too. Raises JobError: the problems that a process left with `leave_problems`, or MS604 with the
    lost rank.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.run import parse_args

    where = list(passthrough) or ["--standalone", "--local-addr", "127.0.0.1"]
    arguments = parse_args([*where, "--nproc-per-node", str(nproc), "--no-python", "command"])  # type: ignore[no-untyped-call]
    arguments.training_script, *arguments.training_script_args = command  # its own words are not for torchrun
    arguments.signals_to_handle = ""  # torchrun's own handlers give up waiting at a second signal
    defaults = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // nproc)), SAVING_TIME: _SECONDS_TO_SAVE}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    with _restored({**defaults, **os.environ, "PATH": path, **env, error_file.LAUNCHED: str(os.getpid())}):
        _hand_on_first(heeded(_HANDLED))
        try:
            _run(arguments)
        except SignalException as stop:
            if stop.sigval == signal.SIGHUP:
                leave_terminal()
            return SIGNALLED + stop.sigval
    return 0


def _run(arguments: Any) -> None:
    """Run torchrun's agent until the processes have ended. Raises JobError."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import run

    try:
        run(arguments)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        _end_orphans(error)
        rank, failure = min(error.failures.items(), key=_blame)
        status = failure.exitcode if failure.exitcode > 0 else SIGNALLED - failure.exitcode
        lost = JobError(_problems(rank, failure), status)
        if arguments.master_addr and arguments.node_rank:
            _tell_other_nodes(lost, rank, arguments)
        raise lost from None


def joined(environ: Mapping[str, str]) -> dict[str, str] | None:
    """The variables of a job that this process already belongs to, or None.

    A job is one that torchrun started (RANK and WORLD_SIZE), or a Slurm step of more than one task.
    Raises RunError (MS301) for a variable of the job that is not a number.
    """
    is_torchrun = "RANK" in environ and "WORLD_SIZE" in environ
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK") if is_torchrun else _SLURM
    if wrong := [name for name in names if not environ.get(name, "0").isdigit()]:
        fix = "start the job with torchrun or Slurm, which set these variables, or unset them"
        texts = [f"the environment variable {name} is {environ[name]!r}, not a whole number" for name in wrong]
        raise RunError(Problem("MS301", text, fix=advice(fix)) for text in texts)
    if is_torchrun:
        return {"RANK": environ["RANK"], "WORLD_SIZE": environ["WORLD_SIZE"], "LOCAL_RANK": environ.get("LOCAL_RANK", "0")}
    if "SLURM_PROCID" not in environ or int(environ.get("SLURM_NTASKS", "1")) < 2:
        return None
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_NTASKS"],
        "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or first_host(environ.get("SLURM_STEP_NODELIST", "localhost")),
        "MASTER_PORT": environ.get("MASTER_PORT") or str(20000 + int(environ.get("SLURM_JOB_ID", "0")) % 20000),
    }


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: ``"rack[03-07,9]-a,other"`` -> ``"rack03-a"``."""
    name, bracket, rest = nodes.partition("[")
    if not bracket or "," in name:
        return nodes.partition(",")[0]
    numbers, _, tail = rest.partition("]")
    first = numbers.replace("-", ",").partition(",")[0]
    return name + first + tail.partition(",")[0]


def end_with_launcher() -> None:
    """Have the kernel kill this process when its launcher ends, also by SIGKILL; on other systems than Linux do nothing.

    A rank without its torchrun would go on training with the others, and keep its device and the run folder. The launcher of a
    process that a rank has started is not torchrun.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and not {error_file.LAUNCHED, rendezvous.JOINED} & os.environ.keys():
        parent_process.end_with(os.getppid())
        return
    launcher = os.environ.get(error_file.LAUNCHED, "")
    if launcher == str(os.getppid()) or (launcher.isdigit() and os.getppid() == 1 and not _runs(launcher)):
        parent_process.end_with(int(launcher))


def end_process(status: int) -> NoReturn:
    """End as Python does, but without its teardown of modules: with torch and Megatron it takes more than a second."""
    threading._shutdown()  # type: ignore[attr-defined]  # what Python calls first: it waits for threads
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        status = status or UNWRITTEN
    os._exit(status)


def _runs(process: str) -> bool:
    """Return whether a process has not ended, as one that nothing has waited for yet has."""
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def heeded(signals: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Return the signals without a SIGHUP that this process was started to ignore, as ``nohup`` does."""
    return [number for number in signals if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


def leave_terminal() -> None:
    """Discard what is printed to a terminal from here on: writing to one that has hung up fails."""
    for descriptor in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def leave_problems(error: BaseException) -> None:
    """Tell the other ranks and the launcher why this process ends; without a launcher do nothing."""
    error_file.leave_problems(error)
    rendezvous.report_failure(error)


def _hand_on_first(signals: Iterable[signal.Signals]) -> None:
    """Have torchrun's agent hand the first signal on to the processes, and wait for them whatever comes next."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    received: list[int] = []

    def handle(number: int, frame: Any) -> None:
        is_first, is_second_ctrl_c = not received, number == signal.SIGINT and number in received
        received.append(number)
        if is_second_ctrl_c:
            os._exit(INTERRUPTED)
        if is_first:
            raise SignalException(f"received {signal.Signals(number).name}", signal.Signals(number))

    for number in signals:
        signal.signal(number, handle)


def _blame(item: tuple[int, ProcessFailure]) -> tuple[int, int, int]:
    """Sorts what ended the job first.

    A process that ended for a restart and says what hung, then others that ended for one, then a process that was killed, then
    one that failed, then those that only repeat why another one did, last those that torchrun stopped.
    """
    rank, failure = item
    problems = failure.error_file_data.get("problems", ())
    if failure.exitcode == UNFINISHED:
        return -1 - bool(problems), failure.timestamp, rank
    repeats = any(problem["code"] == "MS612" for problem in problems)
    order = 1 + repeats if failure.exitcode > 0 else 3 * (failure.exitcode == -signal.SIGTERM)
    return order, failure.timestamp, rank


def _end_orphans(error: ChildFailedError) -> None:
    """End what a process that failed has started itself, such as the helpers of a save; each rank is a process group."""
    for failure in error.failures.values():
        with suppress(ProcessLookupError):
            os.killpg(failure.pid, signal.SIGKILL)


def _tell_other_nodes(lost: JobError, rank: int, arguments: Any) -> None:
    """Publish a lost rank in the store that node 0 keeps, for ranks that wait for it before their first process group."""
    place = {"RANK": str(rank), "WORLD_SIZE": str(int(arguments.nnodes) * int(arguments.nproc_per_node))}
    place |= {"MASTER_ADDR": arguments.master_addr, "MASTER_PORT": str(arguments.master_port)}
    rendezvous.report_failure(lost, {**place, "TORCHELASTIC_USE_AGENT_STORE": str(True)})


def _problems(rank: int, failure: ProcessFailure) -> list[Problem]:
    """The problems that a process left, or that it was lost."""
    data: dict[str, Any] = failure.error_file_data
    if data.get("problems"):
        return [Problem.from_json(problem) for problem in data["problems"]]
    end = f"was killed by {failure.signal_name()}" if failure.exitcode < 0 else f"ended with exit status {failure.exitcode}"
    message, fix = data["message"], ""
    chain: tuple[str, ...] = ()
    if isinstance(message, dict):
        end += f": {message['message']}"
        chain = tuple(message["extraInfo"]["py_callstack"].rstrip().splitlines())
    elif failure.exitcode == -signal.SIGKILL:
        fix = "if it was not killed on purpose, the machine may be out of memory; see its kernel log"
    return [Problem("MS604", f"rank {rank} {end}; the other ranks were stopped", chain=chain, fix=advice(fix))]


@contextmanager
def _restored(values: Mapping[str, str]) -> Iterator[None]:
    """Let processes inherit ``values``, and torchrun's agent log nothing; afterwards variables and handlers are as before."""
    from unittest.mock import patch

    disabled = logging.root.manager.disable
    handlers = {number: signal.getsignal(number) for number in _HANDLED}
    logging.disable(logging.ERROR)  # `launch` says the same in its own words
    try:
        with patch.dict(os.environ, values):
            yield
    finally:
        logging.disable(disabled)
        for number, handler in handlers.items():
            signal.signal(number, handler)
