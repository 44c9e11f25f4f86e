"""Coordination of ranks under the rules of a backend: a thread of rank 0 knows the queues of all ranks.

Every rank reports what it starts and what it waits for, and continues when that is complete by the rules. When no rank can
continue, the coordinator tells all of them why. So a job that would hang on a device ends with a report.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

from mindspeed.features.device_emulation.queues import Mismatch, Operation, Queues
from mindspeed.problems import Fix, PlatformError, Problem, RunError

_ENDING: Final = 10.0
"""Seconds that rank 0 waits for the other ranks at its end."""
_SWITCH_INTERVAL: Final = 2e-4
"""Seconds after which Python lets the coordinator run beside the computation of rank 0."""
_ORDER: Final = Fix.advise("let all ranks start these operations in the same order, or use separate groups, or a batch")


class RankMessage(NamedTuple):
    """A message of a rank: operations that it starts, and those that it waits for (none, some, or all with None).

    ``site`` is the line that waits. With ``ends`` the rank starts no more operations, because of ``problem`` if there is one.
    """

    started: tuple[Operation, ...] = ()
    waits: bool = False
    numbers: tuple[int, ...] | None = ()
    site: str = ""
    ends: bool = False
    problem: Problem | None = None


class Coordinator:
    """The queues, the requests that wait, and the ranks that have ended."""

    def __init__(self, backend: str, ranks: int) -> None:
        self._backend = backend
        self._ranks = ranks
        self._queues = Queues()
        self._waiting: dict[int, RankMessage] = {}
        self._ended: dict[int, bool] = {}
        self.problem: Problem | None = None

    def receive(self, rank: int, request: RankMessage) -> None:
        """Take a request of a rank."""
        for operation in request.started:
            difference = self._queues.post(operation)
            if difference is not None and self.problem is None:
                self.problem = _difference_problem(self._backend, difference)
        self.problem = self.problem or request.problem
        if request.waits:
            self._waiting[rank] = request
        if request.ends:
            self._ended[rank] = True

    def lose(self, rank: int) -> None:
        """Note that a rank has ended without a word."""
        self._ended.setdefault(rank, False)
        self._waiting.pop(rank, None)

    def ready(self) -> list[int]:
        """Return the ranks whose request is answered; they wait no more. Finds out whether the others wait for ever."""
        done = [rank for rank, request in self._waiting.items() if not self._queues.unfinished(rank, request.numbers)]
        for rank in done:
            del self._waiting[rank]
        if not done and self._waiting and len(self._waiting.keys() | self._ended.keys()) == self._ranks and not self.problem:
            self.problem = self._deadlock()
        if self.problem is not None:
            done += self._waiting
            self._waiting.clear()
        return done

    @property
    def over(self) -> bool:
        return len(self._ended) == self._ranks

    def _deadlock(self) -> Problem:
        waiting = sorted(self._waiting)
        rows = [row for rank in waiting for row in self._rows(rank, self._waiting[rank])]
        rows += [
            f"rank {rank} has ended" if ended else f"rank {rank} ended early" for rank, ended in sorted(self._ended.items())
        ]
        names = f"rank {waiting[0]} waits" if len(waiting) == 1 else f"ranks {', '.join(map(str, waiting))} wait"
        text = f"with the rules of {self._backend} the job hangs: {names} for operations that never complete"
        return Problem("MS619", text, chain=tuple(rows), fix=_ORDER)

    def _rows(self, rank: int, request: RankMessage) -> Iterator[str]:
        """Yield the operation that a rank waits for, what is ahead of it, and what the other ranks lack."""
        operation = self._queues.unfinished(rank, request.numbers)[0]
        waits = f", which it waits for at {request.site}" if request.site != operation.site else ""
        yield f"rank {rank} waits for {operation}{waits}"
        for earlier in self._queues.ahead_of(operation)[:1]:
            yield f"  ahead of it in the queue of {operation.communicator}: {earlier}"
            operation = earlier
        for other, met in self._queues.counterparts(operation):
            if met is None:
                yield f"  rank {other} has not started its part"
            else:
                for earlier in self._queues.ahead_of(met)[:1]:
                    yield f"  on rank {other} its part, {met}, is behind {earlier}"


def _difference_problem(backend: str, difference: Mismatch) -> Problem:
    first, second = difference
    where = f"ranks {first.rank} and {second.rank} start different operations on {first.communicator}"
    text = f"with the rules of {backend} the job hangs: {where}"
    rows = [f"rank {operation.rank}: {operation}, {' '.join(map(str, operation.parts))}" for operation in difference]
    return Problem("MS619", text, chain=tuple(rows), fix=_ORDER)


class Server:
    """A coordinator in a thread of this process, with a connection from every rank."""

    def __init__(self, backend: str, ranks: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mindspeed-rules-")
        self.address = str(Path(self._folder.name) / "ranks")
        self._listener = Listener(self.address, "AF_UNIX", backlog=ranks)
        self._ranks = ranks
        self._coordinator = Coordinator(backend, ranks)
        self._thread = threading.Thread(target=self._serve, name="mindspeed-rules", daemon=True)
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_INTERVAL)
        self._thread.start()

    def close(self) -> None:
        """Wait until all ranks have ended, and end the thread."""
        self._thread.join(_ENDING)
        sys.setswitchinterval(self._interval)
        self._listener.close()
        self._folder.cleanup()

    def _serve(self) -> None:
        connections: dict[Any, int] = {}
        for _ in range(self._ranks):
            connection = self._listener.accept()
            connections[connection] = connection.recv()
        while connections and not self._coordinator.over:
            ready: list[Any] = wait(list(connections))
            for connection in ready:
                rank = connections[connection]
                try:
                    self._coordinator.receive(rank, connection.recv())
                except (EOFError, OSError):
                    self._coordinator.lose(rank)
                    del connections[connection]
            answered = set(self._coordinator.ready())
            for connection in [connection for connection, rank in connections.items() if rank in answered]:
                with suppress(OSError):  # a rank that has ended is noticed by the loop
                    connection.send(self._coordinator.problem)


class RankConnection:
    """The connection of a rank to the coordinator."""

    def __init__(self, address: str, rank: int) -> None:
        self.rank = rank
        self._connection: Connection[RankMessage | int, Problem | None] = Client(address, "AF_UNIX")
        self._connection.send(rank)
        self._lock = threading.Lock()

    def start(self, *operations: Operation) -> None:
        """Report operations that this rank starts."""
        with self._lock:
            self._connection.send(RankMessage(operations))

    def wait(self, numbers: Sequence[int] | None, site: str, *started: Operation) -> None:
        """Block until operations are complete by the rules. Raises RunError with MS619 when they never will be."""
        with self._lock:
            try:
                self._connection.send(RankMessage(started, True, None if numbers is None else tuple(numbers), site))
                problem = self._connection.recv()
            except (EOFError, OSError) as error:
                text = "rank 0, which checks the rules of the backend, has ended"
                raise RunError([Problem("MS604", text, fix=Fix.advise("read the output of rank 0"))]) from error
        if problem is not None:
            raise RunError([problem])

    def fail(self, problem: Problem) -> NoReturn:
        """Report why this rank ends, so that the other ranks give the same reason. Raises PlatformError."""
        with self._lock:
            self._connection.send(RankMessage(ends=True, problem=problem))
        raise PlatformError([problem])

    def end(self) -> None:
        """Report that this rank starts no more operations."""
        with suppress(OSError):
            self._connection.send(RankMessage(ends=True))
        self._connection.close()
