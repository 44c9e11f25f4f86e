"""``python -m MODULE`` in processes that are forked from one with torch and Megatron imported.

    subprocess.run([*warm_python(), "-m", "mindspeed", "pretrain", ...])

A process needs 6 s of CPU time for its imports, a forked one none. Output, folder, variables, exit status and signals are those
of a process of its own; so are those of the ranks that a launcher starts. What a process reads of its variables before it
imports torch stays that of the one that forks; a test of such variables, of the command lines of processes, or of imports
starts Python itself.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ClassVar, Final, NoReturn

import psutil

_ROOT: Final = Path(__file__).resolve().parents[1]
_SERVER: Final = "import sys, tests.warm_processes; tests.warm_processes.Server(sys.argv[1]).serve()"
"""Not a module that is run: multiprocessing would run that anew in each process."""
_WARM: Final = (
    "torch.distributed.run",
    "torch.utils.tensorboard",
    "mindspeed.cli.pretrain",
    "mindspeed.cli.run",
    "mindspeed.workbench.training.trainer",
    "mindspeed.workbench.verification.warm",
)
"""What ranks and launchers import."""
_FROM_THE_START: Final = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
"""Variables that cannot be set later: `become` sets the number of threads, and ``mindspeed run`` the same seed."""

_forking: list[psutil.Process] = []


@cache
def warm_python() -> tuple[str, ...]:
    """The words that stand for ``python`` in a command; the process that forks ends with this one."""
    folder = tempfile.TemporaryDirectory(prefix="mindspeed-warm-")
    address = str(Path(folder.name) / "socket")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MINDSPEED_", "SLURM_"))}
    command = [sys.executable, "-W", "ignore", "-c", _SERVER, address]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    server = subprocess.Popen(command, cwd=_ROOT, env=kept | _FROM_THE_START, **pipes)
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    _forking.extend(psutil.Process(server.pid).children())
    atexit.register(folder.cleanup)
    atexit.register(server.communicate)
    return _client(address)


def _client(address: str) -> tuple[str, ...]:
    return sys.executable, "-I", "-S", str(Path(__file__).with_name("warm_client.py")), address


def cpu_seconds() -> float:
    """What the processes have taken that have ended."""
    ended = [process.cpu_times() for process in _forking]
    return sum(times.children_user + times.children_system for times in ended)


@dataclass(frozen=True, slots=True)
class _Running:
    client: socket.socket
    process: BaseProcess
    parent: int


class Server:
    """Starts a process for each client, tells it the status, and kills the process of a client or parent that is gone."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen()
        self._running: list[_Running] = []
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*_WARM])

    def serve(self) -> None:
        """Serve until standard input is closed."""
        first = self._context.Process()
        first.start()  # waits for the imports
        first.join()
        print("ready", flush=True)
        while sys.stdin not in (ready := wait([sys.stdin, self._listener, *self._ends()])):
            if self._listener in ready:
                self._start()
            for running in self._running.copy():
                if running in self._running and (running.client in ready or running.process.sentinel in ready):
                    self._end(running)
        while self._running:
            self._end(self._running[0])

    def _ends(self) -> list[Any]:
        return [end for running in self._running for end in (running.client, running.process.sentinel)]

    def _start(self) -> None:
        client, _ = self._listener.accept()
        _, descriptors, _, _ = socket.recv_fds(client, 1, 3)
        streams: list[Connection[Any, Any]] = [Connection(descriptor) for descriptor in descriptors]
        if text := client.makefile().readline():  # else the client has ended
            message = json.loads(text)
            process = self._context.Process(target=become, args=(message, streams, self._address))
            process.start()
            self._running.append(_Running(client, process, message["parent"]))
            _tell(client, process.pid)
        for stream in streams:
            stream.close()

    def _end(self, running: _Running) -> None:
        """The process has ended, or its client has."""
        self._running.remove(running)
        if running.process.is_alive():
            running.process.kill()
        running.process.join()
        _tell(running.client, running.process.exitcode)
        running.client.close()
        for other in [other for other in self._running if other.parent == running.process.pid]:
            self._end(other)


def _tell(client: socket.socket, number: int | None) -> None:
    with suppress(OSError):  # the client has ended
        client.sendall(f"{number}\n".encode())


def become(message: Mapping[str, Any], streams: Sequence[Connection[Any, Any]], address: str) -> NoReturn:
    """Run the module of a message in this process, and end it."""
    for target, stream in enumerate(streams):
        os.dup2(stream.fileno(), target)
        stream.close()
    sys.stdin = os.fdopen(0, closefd=False)  # multiprocessing has put another file in its place
    os.chdir(message["folder"])
    os.environ.clear()
    os.environ.update(message["variables"])
    import torch
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    WarmPopen.python = _client(address)
    subprocess.Popen = WarmPopen  # type: ignore[misc]
    subprocess_handler.Popen = WarmPopen  # type: ignore[attr-defined]
    _run(message["words"])


def _run(words: Sequence[str]) -> NoReturn:
    """``python SCRIPT ARGUMENT...`` or ``python -m MODULE ARGUMENT...``."""
    from mindspeed.engine.runtime.launch import end_process

    rest = list(words[words[0] == "-u" :])
    is_module = rest[0] == "-m"
    program, *arguments = rest[is_module:]
    sys.argv = [program, *arguments]
    search = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:1] = [os.getcwd() if is_module else str(Path(program).parent), *search]
    if not hasattr(sys.modules.get(program), "__path__"):
        sys.modules.pop(program, None)
    status: Any = 1
    try:
        if is_module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program, run_name="__main__")
        status = 0
    except SystemExit as ended:
        status = 0 if ended.code is None else ended.code
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    end_process(status)


class WarmPopen(subprocess.Popen[Any]):
    """A process for ``python -m`` or ``python -u`` is forked too."""

    python: ClassVar[tuple[str, ...]]

    def _execute_child(self, args: Any, *options: Any) -> None:
        if isinstance(args, list | tuple) and args[0] == sys.executable and args[1] in ("-m", "-u"):
            args = (*self.python, *args[1:])
        super()._execute_child(args, *options)  # type: ignore[misc]
