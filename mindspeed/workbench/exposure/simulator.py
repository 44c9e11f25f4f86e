"""Simulation of programs: when each kernel runs, each transfer is under way, and each stream waits.

A rank gives its program to the device without waiting itself. The operations of a communicator run in the order of their posts,
one after another. A message begins when it is next in the queues of both its ranks and the links of both are free, a collective
when it is next in the queues of all. Operations of different communicators overlap where their links differ. A rank without a
program is ready when the others are.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from mindspeed.workbench.exposure.machines import Topology
from mindspeed.workbench.exposure.programs import Computation, Event, PeerTransfer, Post, Programs


class Interval(NamedTuple):
    """The work of a rank from ``begin`` to ``end`` on a lane: a stream, or the queue of a communicator."""

    rank: int
    lane: str
    name: str
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(slots=True)
class Timeline:
    """Intervals of kernels, of waits of streams, and of transfers."""

    kernels: list[Interval] = field(default_factory=list)
    waits: list[Interval] = field(default_factory=list)
    transfers: list[Interval] = field(default_factory=list)

    @property
    def makespan(self) -> float:
        """Return the end of the last interval."""
        return max((one.end for one in (*self.kernels, *self.waits, *self.transfers)), default=0.0)

    def exposed(self, rank: int) -> float:
        """Return the seconds that the compute stream of a rank waits for transfers."""
        return sum(wait.seconds for wait in self.waits if wait.rank == rank and wait.lane == "compute")

    def transferred(self, rank: int) -> float:
        """Return the seconds of a rank's transfers, from the begin of each operation to its end."""
        return sum(transfer.seconds for transfer in self.transfers if transfer.rank == rank)

    @property
    def slowest(self) -> int:
        """Return the rank that waits longest."""
        return max({kernel.rank for kernel in self.kernels}, key=lambda rank: (self.exposed(rank), -rank))


class StuckError(ValueError):
    """Programs of which none can go on."""


@dataclass(eq=False, slots=True)
class _Operation:
    """A post that was reached at ``ready``; ``left`` are the parts that have not begun."""

    rank: int
    post: Post
    ready: float
    left: list[PeerTransfer]
    begin: float = math.inf
    end: float = 0.0


_End = tuple[_Operation, PeerTransfer]
"""An end of a transfer: the sender or the receiver of a message, or a rank of a collective."""


@dataclass(eq=False, slots=True)
class _Rank:
    """The program of a rank up to ``place``, and the time of each of its streams."""

    program: Sequence[Event]
    place: int = 0
    streams: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    ended: dict[int, _Operation] = field(default_factory=dict)


def simulate(programs: Programs, machine: Topology) -> Timeline:
    """Run programs on a machine. Raises StuckError where ranks wait for one another."""
    return _Simulation(programs, machine).run()


class _Simulation:
    def __init__(self, programs: Programs, machine: Topology) -> None:
        self.machine = machine
        self.ranks = {rank: _Rank(program) for rank, program in programs.items()}
        self.queues: defaultdict[tuple[str, int], deque[_Operation]] = defaultdict(deque)
        self.free: defaultdict[tuple[int, str, str], float] = defaultdict(float)
        self.possible: list[tuple[float, int, list[_End]]] = []
        self.found = Timeline()
        self._numbers = count()

    def run(self) -> Timeline:
        for rank in self.ranks:
            self._advance(rank)
        while self.possible:
            bound, _, ends = heapq.heappop(self.possible)
            ports = [port for end in ends for port in self._ports(*end)]
            start = max([bound, *(self.free[port] for port in ports)])
            if start > bound:
                heapq.heappush(self.possible, (start, next(self._numbers), ends))
                continue
            self._transfer(ends, start, ports)
        if stuck := [(rank, state.program[state.place]) for rank, state in self.ranks.items() if self._is_open(state)]:
            raise StuckError(f"ranks wait for one another: {', '.join(f'rank {rank} at {event}' for rank, event in stuck)}")
        return self.found

    def _is_open(self, state: _Rank) -> bool:
        return state.place < len(state.program)

    def _advance(self, rank: int) -> None:
        """Run the program of a rank until it waits for an operation that has not ended."""
        state = self.ranks[rank]
        while self._is_open(state):
            event = state.program[state.place]
            now = state.streams[event.stream]
            if isinstance(event, Computation):
                end = state.streams[event.stream] = now + event.flops / self.machine.flops
                self.found.kernels.append(Interval(rank, event.stream, event.name, now, end))
            elif isinstance(event, Post):
                operation = _Operation(rank, event, now, list(event.parts))
                queue = self.queues[event.communicator, rank]
                queue.append(operation)
                if queue[0] is operation:
                    self._meet(operation, now)
            else:
                if (operation := state.ended.get(event.number)) is None:  # type: ignore[assignment]
                    return
                if operation.end > now:
                    self.found.waits.append(Interval(rank, event.stream, operation.post.name, now, operation.end))
                    state.streams[event.stream] = operation.end
            state.place += 1

    def _meet(self, operation: _Operation, begin: float) -> None:
        """Find what can begin now that an operation is next in its queue, from ``begin`` on."""
        operation.ready = max(operation.ready, begin)
        post = operation.post
        heads = {rank: self.queues[post.communicator, rank] for rank in post.ranks if rank in self.ranks}
        for part in post.parts:
            if part.peer is None:
                met = [(queue[0], queue[0].left[0]) for queue in heads.values() if queue and queue[0].left]
                if len(met) == len(heads):
                    self._add(met)
            elif part.peer not in heads:
                self._add([(operation, part)])
            elif queue := heads[part.peer]:
                wanted = ("recv" if part.direction == "send" else "send", operation.rank)
                ends = ((queue[0], other) for other in queue[0].left if (other.direction, other.peer) == wanted)
                if (end := next(ends, None)) is not None:
                    self._add([(operation, part), end])

    def _add(self, ends: list[_End]) -> None:
        heapq.heappush(self.possible, (max(operation.ready for operation, _ in ends), next(self._numbers), ends))

    def _ports(self, operation: _Operation, part: PeerTransfer) -> Iterator[tuple[int, str, str]]:
        """Yield the links of a rank that a transfer occupies."""
        post = operation.post
        if part.peer is not None:
            yield operation.rank, self.machine.link(operation.rank, part.peer), part.direction
        elif len(post.ranks) == 1:
            yield operation.rank, "host", post.communicator
        else:
            yield from ((operation.rank, link, way) for link in self.machine.links_of(post.ranks) for way in ("send", "recv"))

    def _transfer(self, ends: list[_End], start: float, ports: list[tuple[int, str, str]]) -> None:
        """Let a transfer take place, and go on with all that waits for its operations."""
        operation, part = ends[0]
        if part.peer is None:
            seconds = self.machine.collective(operation.post)
        else:
            seconds = self.machine.message(part.bytes, operation.rank, part.peer)
        self.free.update(dict.fromkeys(ports, start + seconds))
        for operation, part in ends:
            operation.left.remove(part)
            operation.begin, operation.end = min(operation.begin, start), max(operation.end, start + seconds)
        for operation in [operation for operation, _ in ends if not operation.left]:
            post = operation.post
            self.found.transfers.append(Interval(operation.rank, post.communicator, post.name, operation.begin, operation.end))
            queue = self.queues[post.communicator, operation.rank]
            queue.popleft()
            self.ranks[operation.rank].ended[operation.post.number] = operation
            if queue:
                self._meet(queue[0], operation.end)
            self._advance(operation.rank)
