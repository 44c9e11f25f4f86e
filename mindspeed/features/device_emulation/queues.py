"""Operations of all ranks in the queues of their communicators: which of them can run, and which wait for one another.

No torch, no processes: the state of `Queues` depends on nothing but the order in which each rank has started its operations.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Literal, NamedTuple

Ranks = tuple[int, ...]


class Communicator(NamedTuple):
    """A communicator: the name and the description of its group, and its ranks in the job.

    With ``pair`` it has two ranks of the group. With ``creation`` it is the creation of that communicator, a queue of its own.
    """

    name: str
    group: str
    ranks: Ranks
    pair: bool = False
    creation: bool = False

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        return f"the communicator of ranks {ranks} in group {self.group}"


class Part(NamedTuple):
    """A transfer of an operation: its direction, the other rank (None in a collective), and what both ends agree on.

    An all-to-all also has the number of elements that each rank of its communicator gets from this one, and gives it.
    """

    direction: Literal["send", "recv", "all"]
    peer: int | None
    content: tuple[object, ...]
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()

    def __str__(self) -> str:
        sizes = f" sends {self.sent} and expects {self.received} elements" if self.sent else ""
        return f"{self.content}{sizes}"


@dataclass(eq=False)
class Operation:
    """An operation of a rank; ``number`` counts those of the rank, ``site`` is the line that has started it."""

    rank: int
    number: int
    name: str
    communicator: Communicator
    parts: tuple[Part, ...]
    site: str
    left: list[Part] = field(init=False)

    def __post_init__(self) -> None:
        self.left = list(self.parts)

    def __str__(self) -> str:
        if self.communicator.creation:
            return f"the creation of {self.communicator} for {self.name} at {self.site}"
        return f"{self.name} at {self.site}"


class Mismatch(NamedTuple):
    """Two operations that meet in a communicator and differ."""

    first: Operation
    second: Operation


class Queues:
    """The queues of all ranks of a job."""

    def __init__(self) -> None:
        self._queues: defaultdict[Communicator, dict[int, deque[Operation]]] = defaultdict(dict)
        self._open: dict[tuple[int, int], Operation] = {}

    def post(self, operation: Operation) -> Mismatch | None:
        """Start an operation; the first two that differ where they meet, if any do."""
        self._queues[operation.communicator].setdefault(operation.rank, deque()).append(operation)
        self._open[operation.rank, operation.number] = operation
        return self._advance(operation.communicator)

    def unfinished(self, rank: int, numbers: Sequence[int] | None) -> list[Operation]:
        """Return the operations of a rank that are not complete: of these numbers, or all."""
        if numbers is None:
            return [operation for (owner, _), operation in self._open.items() if owner == rank]
        return [self._open[rank, number] for number in numbers if (rank, number) in self._open]

    def ahead_of(self, operation: Operation) -> list[Operation]:
        """Return the operations in the queue of a rank that hold a later one."""
        queue = self._queues[operation.communicator][operation.rank]
        return list(queue)[: queue.index(operation)]

    def counterparts(self, operation: Operation) -> Iterator[tuple[int, Operation | None]]:
        """Yield each rank that an operation waits for, with its operation that will meet this one; None was not started."""
        queues = self._queues[operation.communicator]
        if operation.left[0].direction == "all":
            place = self._completed(operation)
            for rank in operation.communicator.ranks:
                if rank != operation.rank and (met := self._at(rank, operation.communicator, place)) is not operation:
                    yield rank, met
            return
        for part in operation.left:
            peer = part.peer if part.peer is not None else operation.rank
            wanted = "recv" if part.direction == "send" else "send"
            found = (
                other
                for other in queues.get(peer, ())
                if any(end.direction == wanted and end.peer == operation.rank for end in other.left)
            )
            yield peer, next(found, None)

    def _completed(self, operation: Operation) -> int:
        return len(self.ahead_of(operation))

    def _at(self, rank: int, communicator: Communicator, place: int) -> Operation | None:
        queue = self._queues[communicator].get(rank, deque())
        return queue[place] if place < len(queue) else None

    def _advance(self, communicator: Communicator) -> Mismatch | None:
        """Run what can run: operations at the heads of their queues that meet."""
        queues = self._queues[communicator]
        while True:
            heads = {rank: queue[0] for rank, queue in queues.items() if queue}
            if (difference := _collective_difference(heads)) is not None:
                return difference
            complete = _whole_collective(heads, communicator)
            if (difference := _exchange_difference(complete)) is not None:
                return difference
            for head in heads.values():
                for part in [part for part in head.left if part.direction == "send"]:
                    if (difference := _deliver(head, part, heads.get(-1 if part.peer is None else part.peer))) is not None:
                        return difference
            complete += [head for head in heads.values() if not head.left]
            if not complete:
                return None
            for head in complete:
                queues[head.rank].popleft()
                del self._open[head.rank, head.number]


def _collective(operation: Operation) -> bool:
    return any(part.direction == "all" for part in operation.parts)


def _collective_difference(heads: dict[int, Operation]) -> Mismatch | None:
    """Return two collectives at heads of queues that differ."""
    collectives = [head for head in heads.values() if _collective(head)]
    contents = [[part.content for part in head.parts] for head in collectives]
    return next(
        (Mismatch(collectives[0], head) for head, its in zip(collectives, contents, strict=True) if its != contents[0]), None
    )


def _whole_collective(heads: dict[int, Operation], communicator: Communicator) -> list[Operation]:
    """Return the operations of a collective that all ranks have reached."""
    if set(heads) != set(communicator.ranks) or not all(map(_collective, heads.values())):
        return []
    return list(heads.values())


def _exchange_difference(operations: Sequence[Operation]) -> Mismatch | None:
    """Return two operations of a whole all-to-all, one of which expects another number of elements than the other sends."""
    places = {rank: place for operation in operations for place, rank in enumerate(operation.communicator.ranks)}
    for sender, receiver in product(operations, repeat=2):
        for ours, theirs in zip(sender.parts, receiver.parts, strict=True):
            if ours.sent and ours.sent[places[receiver.rank]] != theirs.received[places[sender.rank]]:
                return Mismatch(sender, receiver)
    return None


def _deliver(sender: Operation, part: Part, receiver: Operation | None) -> Mismatch | None:
    """Let a send meet the first receive from its rank in the operation at the head of the other queue."""
    if receiver is None:
        return None
    for end in receiver.left:
        if end.direction == "recv" and end.peer == sender.rank:
            if end.content != part.content:
                return Mismatch(sender, receiver)
            sender.left.remove(part)
            receiver.left.remove(end)
            return None
    return None
