"""How long do a thousand ranks take to agree that they have one plan, and how long until all know that one of them is odd?

Real clients of one store on this machine: a few processes with a connection and a thread per rank.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import Any

from benchmarks.table import Row, main
from mindspeed.activation.agreement import agree
from mindspeed.plugins.problems import RunError

COMMAND = "python -m benchmarks.agreement"
RANKS = 1000
PROCESSES = 4
FACTS = {f"setting feature-{index}.value": str(index) for index in range(200)}


def client(port: int, name: str) -> Any:
    """A connection of its own to the store, with keys of its own measurement."""
    from torch.distributed import PrefixStore, TCPStore

    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=120))
    return PrefixStore(name, store)


def take_part(store: Any, rank: int, odd: bool, told: list[float]) -> None:
    """Be one rank: note when it knows the verdict."""
    facts = FACTS | ({"level": "1"} if odd and rank == RANKS - 1 else {})
    try:
        agree(store, rank, RANKS, facts)
    except RunError:
        if not odd:
            raise
    told.append(time.time())


def ranks(port: int, name: str, first: int, last: int) -> None:
    """One process with the ranks from ``first`` to ``last``; prints when the last of them knew the verdict."""
    stores = {rank: client(port, name) for rank in range(first, last)}
    told: list[float] = []
    threads = [threading.Thread(target=take_part, args=(store, rank, name == "odd", told)) for rank, store in stores.items()]
    control = client(port, f"{name} control")
    control.add("connected", last - first)
    control.wait(["go"], timedelta(seconds=120))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == last - first
    print(max(told))


def seconds(name: str) -> float:
    """From the moment at which all ranks are connected and start to write, to the last of them that knows the verdict."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    share = RANKS // PROCESSES
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.agreement", "--ranks", str(store.port), name, str(first), str(first + share)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for first in range(0, RANKS, share)
    ]
    control = client(store.port, f"{name} control")
    while control.add("connected", 0) < RANKS:
        time.sleep(0.05)
    start = time.time()
    control.set("go", "")
    ends = [float(process.communicate(timeout=120)[0]) for process in processes]
    return max(ends) - start


def rows() -> list[Row]:
    return [
        Row(
            f"{RANKS} ranks agree on their plan", 5, seconds("equal"), "s", COMMAND, f"{PROCESSES} processes, one thread a rank"
        ),
        Row(f"one of {RANKS} ranks is odd, until all know", 5, seconds("odd"), "s", COMMAND),
    ]


if __name__ == "__main__":
    if "--ranks" in sys.argv:
        port, name, first, last = sys.argv[2:]
        ranks(int(port), name, int(first), int(last))
    else:
        main(rows)
