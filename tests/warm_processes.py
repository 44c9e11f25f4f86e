"""``python -m MODULE`` in processes that are forked from one with torch and Megatron imported.

    subprocess.run([*warm_python(), "-m", "mindspeed", "pretrain", ...])

A rank needs 6 s of CPU time for its imports, a forked one none. Output, folder, variables, exit status and signals are those
of a process of its own. The ranks of a launcher are forked before it has threads, as many as its command line asks for. What
a process reads of its variables before it imports torch stays that of the one that forks; a test of such variables, of the
command lines of processes, or of imports starts Python itself.
"""

from __future__ import annotations

import array
import atexit
import json
import os
import re
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Final, NoReturn

_ROOT: Final = Path(__file__).resolve().parents[1]
_HANDED_ON: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)

_FROM_THE_START: Final = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
"""Variables that cannot be set later: `become` sets the number of threads, and ``mindspeed run`` the same seed."""

_servers: list[int] = []


@cache
def warm_python() -> tuple[str, ...]:
    """The words that stand for ``python`` in a command; the process that forks ends with this one."""
    folder = tempfile.TemporaryDirectory(prefix="mindspeed-warm-")
    address = str(Path(folder.name) / "socket")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MINDSPEED_", "SLURM_"))}
    command = [sys.executable, "-W", "ignore", "-m", __name__, address]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    server = subprocess.Popen(command, cwd=_ROOT, env=kept | _FROM_THE_START, **pipes)
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    _servers.append(server.pid)
    atexit.register(folder.cleanup)
    atexit.register(server.communicate)
    return sys.executable, "-I", "-S", __file__, "--at", address


def cpu_seconds() -> float:
    """What the processes have taken that have ended."""
    import psutil

    ended = [psutil.Process(server).cpu_times() for server in _servers]
    return sum(times.children_user + times.children_system for times in ended)


def call(address: str, words: Sequence[str]) -> NoReturn:
    """Have the server run ``words`` with the output, folder and variables of this process, and end as that ends."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        _send(server, {"words": words, "folder": os.getcwd(), "variables": dict(os.environ)}, (0, 1, 2))
        answers = server.makefile()
        process = int(answers.readline())
        for number in _HANDED_ON:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda number, _: os.kill(process, number))
        status = int(answers.readline())
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _send(to: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    text = json.dumps(message).encode() + b"\n"
    if rest := text[to.sendmsg([text], rights) :]:
        to.sendall(rest)


def _receive(source: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A message with its descriptors. Raises EOFError when the other side has ended."""
    text, descriptors, _, _ = socket.recv_fds(source, 1 << 20, 3)
    while text and not text.endswith(b"\n"):
        text += source.recv(1 << 20)
    if not text:
        raise EOFError
    return json.loads(text), descriptors


class Server:
    """Forks a process for each client, tells it the status, and kills the process of a client that is gone."""

    def __init__(self, address: str) -> None:
        self._sources = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen()
        self._sources.register(self._listener, selectors.EVENT_READ)
        self._sources.register(sys.stdin, selectors.EVENT_READ)

    def serve(self) -> None:
        """Serve until standard input is closed."""
        while True:
            for key, _ in self._sources.select():
                if key.fileobj is sys.stdin:
                    return
                if key.fileobj is self._listener:
                    self._start()
                elif key.fd in self._sources.get_map():  # of a process and its client one is enough
                    self._end(*key.data)

    def _start(self) -> None:
        client, _ = self._listener.accept()
        message, descriptors = _receive(client)
        process = os.fork()
        if not process:
            client.close()
            self._listener.close()
            self._sources.close()
            become(message, descriptors, launches=True)
        for descriptor in descriptors:
            os.close(descriptor)
        client.sendall(b"%d\n" % process)
        ends = os.pidfd_open(process)
        for source in (client, ends):
            self._sources.register(source, selectors.EVENT_READ, (process, ends, client))

    def _end(self, process: int, ends: int, client: socket.socket) -> None:
        """The process has ended, or its client has."""
        self._sources.unregister(client)
        self._sources.unregister(ends)
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(ends, signal.SIGKILL)  # no harm to one that has ended
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        os.close(ends)
        with suppress(OSError):
            client.sendall(b"%d\n" % status)
        client.close()


def become(message: Mapping[str, Any], descriptors: Sequence[int], launches: bool = False) -> NoReturn:
    """Run the module of a message in this process, and end it."""
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.chdir(message["folder"])
    os.environ.clear()
    os.environ.update(message["variables"])
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if launches:
        for _ in range(ranks_of(message["words"])):
            WarmPopen.spares.append(Spare())
        subprocess.Popen = WarmPopen  # type: ignore[misc]
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

        subprocess_handler.Popen = WarmPopen  # type: ignore[attr-defined]
    _run(message["words"])


def ranks_of(words: Sequence[str]) -> int:
    """How many ranks a command line starts: what follows ``--nproc`` or ``--nproc-per-node``, else one."""
    given = re.search(r" --nproc(?:-per-node)?[= ](\d+) ", f"{' '.join(words)} ")
    return int(given[1]) if given else 1


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


class Spare:
    """A process that waits for what it shall run."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.process = os.fork()
        if self.process:
            theirs.close()
            self._socket = ours
            return
        ours.close()
        for other in WarmPopen.spares:
            other.close()
        try:
            message, descriptors = _receive(theirs)
        except EOFError:
            os._exit(0)
        if message["session"]:
            os.setsid()
        theirs.sendall(b"\n")
        theirs.close()
        become(message, descriptors)

    def start(self, message: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        """Run the module of a message in it."""
        _send(self._socket, message, descriptors)
        self._socket.recv(1)
        self._socket.close()

    def close(self) -> None:
        """Leave it to the one that has started it."""
        self._socket.close()


class WarmPopen(subprocess.Popen[Any]):
    """A process for ``python -m`` is a spare one, as long as there are any."""

    spares: ClassVar[list[Spare]] = []

    def _execute_child(self, args: Any, *options: Any) -> None:
        if not self.spares or args[0] != sys.executable or args[1] not in ("-m", "-u"):
            super()._execute_child(args, *options)  # type: ignore[misc]
            return
        folder, variables, pipes, session = options[4], options[5], options[9:15], options[-2]
        message = {"words": args[1:], "folder": folder or os.getcwd(), "session": session}
        message["variables"] = dict(os.environ if variables is None else variables)
        streams = [own if stream == -1 else stream for own, stream in enumerate((pipes[0], pipes[3], pipes[5]))]
        spare = self.spares.pop()
        spare.start(message, streams)
        self.pid, self._child_created = spare.process, True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def warm() -> None:
    """Import what ranks and launchers need."""
    import torch.distributed.run
    import torch.utils.tensorboard  # noqa: F401

    import mindspeed.cli.pretrain
    import mindspeed.cli.run
    import mindspeed.workbench.training.trainer
    import mindspeed.workbench.verification.warm  # noqa: F401


if __name__ == "__main__":
    if sys.argv[1] == "--at":
        call(sys.argv[2], sys.argv[3:])
    warm()
    print("ready", flush=True)
    Server(sys.argv[1]).serve()
