"""Ranks of a job, forked from a process that has imported what they need: where tests fork them and wait for them.

The ranks meet in a store of the process that forks them, as those of torchrun do. Its port is bound before a rank is told, so
no other process can take it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Final

GRACE: Final = 10.0
"""Seconds that the other ranks get to end after one has failed."""


def run_ranks(
    count: int, body: Callable[[int], int], limit: float, logs: Path | None = None, grace: float = GRACE
) -> dict[int, int]:
    """Return the exit status of each rank, negative for a signal.

    ``body`` runs in each rank with the variables of torchrun, and returns its status; with ``logs`` its output goes to
    ``rankN.log`` in that folder. Ranks are killed ``limit`` seconds after their start, or ``grace`` after the first failure.
    """
    from torch.distributed import TCPStore

    context = get_context("fork")
    ports: SimpleQueue[int] = context.SimpleQueue()
    ranks = [context.Process(target=_run, args=(rank, count, body, ports, logs)) for rank in range(count)]
    for rank in ranks:
        rank.start()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # has threads, so that it comes after the forks
    for _ in ranks:
        ports.put(store.port)
    end, failed = time.monotonic() + limit, False
    while None in (statuses := [rank.exitcode for rank in ranks]) and time.monotonic() < end:
        if any(statuses) and not failed:
            end, failed = min(end, time.monotonic() + grace), True
        time.sleep(0.02)
    for rank in ranks:
        rank.kill()
        rank.join()
    return {number: rank.exitcode or 0 for number, rank in enumerate(ranks)}


def _run(rank: int, count: int, body: Callable[[int], int], ports: SimpleQueue[int], logs: Path | None) -> None:
    os.environ.update(_variables(rank, count, ports.get()))
    if logs is not None:
        with (logs / f"rank{rank}.log").open("wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
    sys.exit(body(rank))


def _variables(rank: int, count: int, port: int) -> Mapping[str, str]:
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return {name: str(value) for name, value in places.items()} | address
