"""Programs of ranks: kernels, posts of transfers and waits, in the order in which the host gives them to a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple


class Computation(NamedTuple):
    """Work on a stream of its rank, in floating-point operations."""

    name: str
    flops: float
    stream: str = "compute"


class PeerTransfer(NamedTuple):
    """Bytes to or from another rank; of a collective, the bytes of all ranks together."""

    direction: Literal["send", "recv", "all"]
    bytes: float
    peer: int | None = None


@dataclass(frozen=True, slots=True)
class Post:
    """Operation ``number`` of its rank, in the queue of a communicator; it ends with the last of its parts.

    It begins when ``stream`` gets to it, and when the operations before it in the same queue have ended. A copy between device
    and host is a collective of one rank.
    """

    number: int
    name: str
    communicator: str
    ranks: tuple[int, ...]
    parts: tuple[PeerTransfer, ...]
    stream: str = "compute"


class Wait(NamedTuple):
    """A stream that continues when operation ``number`` of its rank has ended."""

    number: int
    stream: str = "compute"


Event = Computation | Post | Wait
Programs = Mapping[int, Sequence[Event]]
"""The program of each rank."""


def at_once(program: Sequence[Event]) -> list[Event]:
    """Return a program that waits for each operation when it has posted it, as one without overlap does.

    A receive alone is waited for where it was: it may be posted long before its sender has anything to send.
    """
    posts = [event for event in program if isinstance(event, Post)]
    sent = {post.number for post in posts if any(part.direction != "recv" for part in post.parts)}
    found: list[Event] = []
    for event in program:
        if not isinstance(event, Wait) or event.number not in sent:
            found.append(event)
        if isinstance(event, Post) and event.number in sent:
            found.append(Wait(event.number, event.stream))
    return found
