"""The process that owns the workers of verification: it forks them, hands jobs to as many as are free, and replaces lost ones.

Run as ``python -m mindspeed.workbench.verification.broker FD FOLDER SECONDS`` with a listening socket on file descriptor FD.
A run of more seconds counts as stuck. The broker ends when its last client has left. Several clients (the processes of a test
run) share the same workers. Workers are forked from this process after it has imported torch and Megatron, in about 15 ms
instead of 6 s. That is safe as long as it has one thread and no process group, which is looked at before every fork;
elsewhere, and for platforms with a device, a worker is a fresh interpreter.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, Final

from mindspeed.engine.runtime import parent_process
from mindspeed.problems import Fix, Problem
from mindspeed.workbench.verification import worker as work
from mindspeed.workbench.verification.job import Answer, WorkerCall

RANKS_AT_ONCE: Final = 4
"""Ranks that run at the same time, whatever the number of clients; a larger job runs alone."""
GRACE: Final = 15.0
"""Seconds that the other workers get to end their job after one has failed."""
FIRST_CLIENT: Final = 60.0
"""Seconds to wait for the first client."""
_CAUSE: Final = re.compile(r"MS\d{3} |[\w.]*(Error|Exception|Exit|Interrupt)\b|Fatal Python error|terminate called")
"""Start of a line that gives the reason why a process ends."""


@dataclass(slots=True, eq=False)
class _Worker:
    pid: int
    connection: Connection[Any, Any]
    log: Path


@dataclass(slots=True, eq=False)
class _Running:
    """The jobs of a request on their workers; ``answers`` by rank as they come."""

    client: Connection[Any, Any]
    workers: list[_Worker]
    deadline: float
    answers: dict[int, Answer] = field(default_factory=dict)

    def waiting(self) -> list[int]:
        return [rank for rank in range(len(self.workers)) if rank not in self.answers]

    @property
    def failure(self) -> Problem | None:
        """The problem that came first, for a rank that has lost another one fails later."""
        return next((answer.outcome for answer in self.answers.values() if isinstance(answer.outcome, Problem)), None)


class Broker:
    """Clients, idle workers, running jobs and those in the queue, in one loop without threads."""

    def __init__(self, listener: socket.socket, folder: Path, time_limit: float) -> None:
        self._listener = listener
        self._folder = folder
        self._time_limit = time_limit
        self._clients: list[Connection[Any, Any]] = []
        self._idle: list[_Worker] = []
        self._running: list[_Running] = []
        self._queue: deque[tuple[Connection[Any, Any], list[WorkerCall]]] = deque()
        self._started = 0
        self._warm = False

    def serve(self) -> None:
        """Serve until the last client has left."""
        self._listener.settimeout(FIRST_CLIENT)
        self._accept()
        while self._clients:
            self._assign()
            for ready in wait(self._sources(), timeout=self._patience()):
                if ready is self._listener:
                    self._accept()
                elif ready in self._clients:
                    self._receive(ready)
                else:
                    self._collect(ready)
            self._end_stuck()
        self._kill([*self._idle, *(worker for running in self._running for worker in running.workers)])

    def _sources(self) -> list[Any]:
        busy = [run.workers[rank].connection for run in self._running for rank in run.waiting()]
        return [self._listener, *self._clients, *busy]

    def _patience(self) -> float | None:
        now = time.monotonic()
        return max(0.0, min(run.deadline for run in self._running) - now) if self._running else None

    def _accept(self) -> None:
        accepted, _ = self._listener.accept()
        self._clients.append(Connection(accepted.detach()))

    def _receive(self, client: Connection[Any, Any]) -> None:
        try:
            self._queue.append((client, client.recv()))
        except (EOFError, OSError):
            self._clients.remove(client)
            client.close()
            self._queue = deque(request for request in self._queue if request[0] is not client)
            for run in [run for run in self._running if run.client is client]:
                self._running.remove(run)
                self._kill(run.workers)

    def _assign(self) -> None:
        """Start jobs of the queue, in its order, on the ranks that are free."""
        while self._queue:
            client, jobs = self._queue[0]
            busy = sum(len(run.workers) for run in self._running)
            if busy and busy + len(jobs) > RANKS_AT_ONCE:
                return
            self._queue.popleft()
            while len(self._idle) < len(jobs):
                self._idle.append(self._start_worker(jobs[0].forkable))
            workers, self._idle = self._idle[: len(jobs)], self._idle[len(jobs) :]
            run = _Running(client, workers, time.monotonic() + self._time_limit)
            self._running.append(run)
            for rank, (worker, job) in enumerate(zip(workers, jobs, strict=True)):
                try:
                    worker.connection.send(job)
                except OSError:
                    self._end(run, self._death(run, rank))
                    break

    def _collect(self, ready: object) -> None:
        for run in self._running:
            for rank in run.waiting():
                if run.workers[rank].connection is ready:
                    self._take_answer(run, rank)
                    return

    def _take_answer(self, run: _Running, rank: int) -> None:
        try:
            run.answers[rank] = run.workers[rank].connection.recv()
        except (EOFError, OSError):
            self._end(run, self._death(run, rank))
            return
        if run.failure:
            run.deadline = min(run.deadline, time.monotonic() + GRACE)
        if run.waiting():
            return
        if run.failure:  # also for the other ranks: one that raised may have groups, threads or a count of groups of its own
            self._end(run, run.failure)
            return
        self._running.remove(run)
        unclean = [run.workers[rank] for rank, answer in run.answers.items() if answer.leftover]
        self._kill(unclean)
        self._idle = [*(worker for worker in run.workers if worker not in unclean), *self._idle]
        _reply(run.client, [answer for _, answer in sorted(run.answers.items())])

    def _end_stuck(self) -> None:
        now = time.monotonic()
        for run in [run for run in self._running if run.deadline <= now]:
            ranks = ", ".join(map(str, run.waiting()))
            message = f"ranks {ranks} of the verification run did not respond for {self._time_limit:g} s"
            fix = Fix.advise(
                "find in the output above the call in which these ranks wait, and remove the feature that makes the call. If "
                "the ranks are only slow, raise --timeout of mindspeed features bisect"
            )
            stuck = Problem("MS604", message, chain=_tail(run.workers[run.waiting()[0]]), fix=fix)
            self._end(run, run.failure or stuck)

    def _end(self, run: _Running, problem: Problem) -> None:
        self._running.remove(run)
        self._kill(run.workers)
        _reply(run.client, problem)

    def _death(self, run: _Running, rank: int) -> Problem:
        worker = run.workers[rank]
        _, status = os.waitpid(worker.pid, 0)
        with suppress(ProcessLookupError):  # the processes that its job has started
            os.killpg(worker.pid, signal.SIGKILL)
        worker.pid = 0
        code = os.waitstatus_to_exitcode(status)
        end = f"signal {-code}" if code < 0 else f"exit status {code}"
        text = f"verification rank {rank} ended with {end}; the others were stopped"
        return Problem(
            "MS604",
            text,
            chain=_tail(worker),
            fix=Fix.advise("check the lines above; after signal 9, check the memory of the machine"),
        )

    def _start_worker(self, warm: bool) -> _Worker:
        if warm and not self._warm and sys.platform == "linux":
            work.warm_up()
            self._warm = True
        forked = warm and self._warm and work.threads() == 1
        ours, theirs = Pipe()
        log = self._folder / f"worker-{self._started}.log"
        self._started += 1
        broker, pid = os.getpid(), os.fork()
        if pid == 0:
            ours.close()  # else a worker would never see that the broker has ended
            self._become_worker(theirs, log, forked, broker)
        with suppress(OSError):  # the worker has done it already
            os.setpgid(pid, pid)
        theirs.close()
        return _Worker(pid, ours, log)

    def _become_worker(self, connection: Connection[Any, Any], log: Path, forked: bool, broker: int) -> None:
        """Never returns: serve jobs in this forked process, or in a fresh interpreter."""
        status = 1
        try:
            parent_process.end_with(broker)
            os.setpgid(0, 0)  # with the processes that a job starts, to end them all
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            if not forked:
                os.set_inheritable(connection.fileno(), True)
                os.execv(sys.executable, [sys.executable, "-m", work.__name__, str(connection.fileno())])
            self._listener.close()
            for other in (*self._clients, *(worker.connection for worker in self._all_workers())):
                other.close()
            work.serve(connection)
            status = 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _all_workers(self) -> Iterable[_Worker]:
        return (*self._idle, *(worker for run in self._running for worker in run.workers))

    def _kill(self, workers: Iterable[_Worker]) -> None:
        for worker in workers:
            worker.connection.close()
            if worker.pid:
                os.killpg(worker.pid, signal.SIGKILL)
                os.waitpid(worker.pid, 0)


def _reply(client: Connection[Any, Any], results: list[Answer] | Problem) -> None:
    with suppress(OSError):  # a client that has left is noticed by the loop
        client.send(results)


def _tail(worker: _Worker) -> tuple[str, ...]:
    """Return the line of the output that names the cause, and the last five lines."""
    lines = worker.log.read_text(errors="replace").splitlines()
    causes = [number for number, line in enumerate(lines) if _CAUSE.match(line)]
    last = max(len(lines) - 5, 0)
    return (*(lines[number] for number in causes[:1] if number < last), *lines[last:])


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the client decides when to end
    Broker(socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2]), float(sys.argv[3])).serve()
