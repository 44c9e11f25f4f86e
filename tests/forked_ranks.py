"""Ranks of a job, forked from a process that has imported what they need: where tests fork them and wait for them.

The ranks meet in a store of the process that forks them, as those of torchrun do. Its port is bound before a rank is told, so
no other process can take it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

GRACE: Final = 10.0
"""Seconds that the other ranks get to end after one has failed."""


def run_ranks(
    count: int, body: Callable[[int], int], limit: float, logs: Path | None = None, grace: float = GRACE
) -> dict[int, int]:
    """Return the exit status of each rank, negative for a signal.

    ``body`` runs in each rank with the variables of torchrun, and returns its status; with ``logs`` its output goes to
    ``rankN.log`` in that folder. Ranks are killed ``limit`` seconds after their start, or ``grace`` after the first failure.
    """
    reading, writing = os.pipe()
    processes = {_fork(rank, count, body, (reading, writing), logs): rank for rank in range(count)}
    os.close(reading)
    store = _store()
    os.write(writing, f"{store.port:>5}".encode() * count)
    os.close(writing)
    return {processes[process]: status for process, status in _statuses(set(processes), limit, grace).items()}


def _store() -> Any:
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _fork(rank: int, count: int, body: Callable[[int], int], pipe: tuple[int, int], logs: Path | None) -> int:
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        os.close(pipe[1])
        os.environ.update(_variables(rank, count, os.read(pipe[0], 5).decode().strip()))
        if logs is not None:
            log = os.open(logs / f"rank{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
        status = body(rank)
    except SystemExit as ended:
        print(ended, file=sys.stderr)
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # the process ends here: what is left above belongs to the one that forked it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _variables(rank: int, count: int, port: str) -> Mapping[str, str]:
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return {name: str(value) for name, value in places.items()} | address


def _statuses(processes: set[int], limit: float, grace: float) -> dict[int, int]:
    statuses: dict[int, int] = {}
    end, killed = time.monotonic() + limit, False
    while len(statuses) < len(processes):
        for process in processes.difference(statuses):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                statuses[process] = os.waitstatus_to_exitcode(status)
                if statuses[process] and not killed:
                    end = min(end, time.monotonic() + grace)
        if time.monotonic() > end and not killed:
            for process in processes.difference(statuses):
                os.kill(process, signal.SIGKILL)
            killed = True
        time.sleep(0.02)
    return statuses
