"""Programs from the log of a real step (``device-emulation.collective_log`` with ``log_steps``)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from mindspeed.workbench.exposure.programs import Computation, Event, PeerTransfer, Post, Wait

_DIRECTIONS: Final[dict[str, Any]] = {"isend": "send", "send": "send", "irecv": "recv", "recv": "recv"}
HOST: Final = "host"
"""Group of copies between device and host in the log."""


def programs_of_steps(lines: Iterable[str], rank: int) -> list[list[Event]]:
    """Return what a rank did from the start of each logged step to that of the next one."""
    communicators: dict[str, tuple[int, ...]] = {}
    steps: list[list[Mapping[str, Any]]] = []
    for row in map(json.loads, lines):
        if row["event"] == "communicator":
            communicators[row["communicator"]] = tuple(row["ranks"])
        elif row["event"] == "step":
            steps.append([])
        elif steps and row["event"] in ("kernel", "launch", "wait"):
            steps[-1].append(row)
    return [list(_events(rows, rank, communicators)) for rows in steps]


def _events(rows: Sequence[Mapping[str, Any]], rank: int, communicators: Mapping[str, tuple[int, ...]]) -> Iterator[Event]:
    launches: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["event"] == "launch":
            launches.setdefault(row["id"], []).append(row)
    for row in rows:
        if row["event"] == "kernel":
            yield Computation(row["op"], row["flops"])
        elif row["event"] == "wait":
            if row["id"] in launches:  # else it was launched in the step before
                yield Wait(row["id"])
        elif row is launches[row["id"]][0]:
            yield _post(launches[row["id"]], rank, communicators)


def _post(launches: Sequence[Mapping[str, Any]], rank: int, communicators: Mapping[str, tuple[int, ...]]) -> Post:
    """Return the operation of calls that were launched together."""
    first = launches[0]
    if first["group"] == HOST:
        size = sum(launch["bytes"] for launch in launches)
        return Post(first["id"], first["kind"], f"{HOST} {first['kind']}", (rank,), (PeerTransfer("all", size),))
    if first["kind"] in _DIRECTIONS:
        parts = tuple(PeerTransfer(_DIRECTIONS[launch["kind"]], launch["bytes"], launch["peer"]) for launch in launches)
    else:
        parts = (PeerTransfer("all", sum(launch["bytes"] for launch in launches)),)
    return Post(first["id"], first["kind"].lstrip("_"), first["communicator"], communicators[first["communicator"]], parts)
