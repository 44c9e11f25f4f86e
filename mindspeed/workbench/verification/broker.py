"""The process that owns the workers of verification: it starts them, hands jobs to as many as are free, and replaces lost ones.

Its arguments are the file descriptor of a listening socket, a folder for logs, and the seconds after which a run counts as
stuck. The broker ends when its last client has left. Several clients (the processes of a test run) share the same workers.
The fork server of multiprocessing imports torch and Megatron and forks workers in about 15 ms instead of 6 s. Where `warm`
refuses that, and for platforms with a device, a worker is a fresh interpreter.
"""

from __future__ import annotations

import multiprocessing
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
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final, cast

from mindspeed.problems import Fix, Problem
from mindspeed.workbench.verification.job import Answer, WorkerCall
from mindspeed.workbench.verification.worker import serve

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
    process: BaseProcess
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
        self._forks = sys.platform == "linux"
        multiprocessing.set_forkserver_preload(["mindspeed.workbench.verification.warm"])

    def serve(self) -> None:
        """Serve until the last client has left."""
        self._listener.settimeout(FIRST_CLIENT)
        self._accept()
        try:
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
        finally:
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
                "the ranks are only slow, run the command again when nothing else runs on this machine"
            )
            stuck = Problem("MS604", message, chain=_tail(run.workers[run.waiting()[0]]), fix=fix)
            self._end(run, run.failure or stuck)

    def _end(self, run: _Running, problem: Problem) -> None:
        self._running.remove(run)
        self._kill(run.workers)
        _reply(run.client, problem)

    def _death(self, run: _Running, rank: int) -> Problem:
        worker = run.workers[rank]
        worker.process.join()
        code = worker.process.exitcode or 0
        end = f"signal {-code}" if code < 0 else f"exit status {code}"
        text = f"verification rank {rank} ended with {end}; the others were stopped"
        return Problem(
            "MS604",
            text,
            chain=_tail(worker),
            fix=Fix.advise("check the lines above; after signal 9, check the memory of the machine"),
        )

    def _start_worker(self, forkable: bool) -> _Worker:
        ours, theirs = Pipe()
        log = self._folder / f"worker-{self._started}.log"
        self._started += 1
        process = self._start_process(forkable, theirs, log)
        theirs.close()
        return _Worker(process, ours, log)

    def _start_process(self, forkable: bool, connection: Connection[Any, Any], log: Path) -> BaseProcess:
        if forkable and self._forks:
            forked = multiprocessing.get_context("forkserver").Process(target=serve, args=(connection, log))
            with suppress(EOFError, OSError):  # the server has ended
                forked.start()
                return forked
            self._forks = False
        fresh = multiprocessing.get_context("spawn").Process(target=serve, args=(connection, log))
        fresh.start()
        return fresh

    def _kill(self, workers: Iterable[_Worker]) -> None:
        for worker in workers:
            worker.connection.close()
            if worker.process.is_alive():
                worker.process.kill()
            with suppress(ProcessLookupError):  # the processes that its job has started
                os.killpg(cast("int", worker.process.pid), signal.SIGKILL)
            worker.process.join()


def _reply(client: Connection[Any, Any], results: list[Answer] | Problem) -> None:
    with suppress(OSError):  # a client that has left is noticed by the loop
        client.send(results)


def _tail(worker: _Worker) -> tuple[str, ...]:
    """Return the line of the output that names the cause, and the last five lines."""
    lines = worker.log.read_text(errors="replace").splitlines()
    causes = [number for number, line in enumerate(lines) if _CAUSE.match(line)]
    last = max(len(lines) - 5, 0)
    return (*(lines[number] for number in causes[:1] if number < last), *lines[last:])


def main() -> None:
    """Serve until the last client has left, with the arguments of the command line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the client decides when to end
    Broker(socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2]), float(sys.argv[3])).serve()
