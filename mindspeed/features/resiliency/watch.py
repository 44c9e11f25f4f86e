"""The watch of a rank: a thread that notices a hang, exchanges what ranks know in the store, and names the ranks that lag."""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from mindspeed.features.resiliency.flight_recorder import last_collective, line_of
from mindspeed.features.resiliency.rank_state import RankState, problem_of, without_store
from mindspeed.problems import RunError
from mindspeed.process.error_file import LAUNCHED, leave_problems
from mindspeed.process.run import UNFINISHED, run_folder

if TYPE_CHECKING:
    from mindspeed.features.resiliency.feature import ResiliencyArgs
    from mindspeed.features.resiliency.heartbeat import Heartbeat

_LONGEST_INTERVAL: Final = 10.0
_SLACK: Final = 10.0
_STORE_TIMEOUT: Final = timedelta(seconds=5)
_KILL_AFTER_TERM: Final = r"""
for i in $(seq 100); do
    [ -e /proc/$0 ] || exit
    grep -qs 'ShdPnd:.*[4-7c-f]...$' /proc/$0/status && break
    sleep 0.3
done
kill -9 $0
"""
"""Kill a process once a SIGTERM is pending in it, or after 30 s: its launcher must first see the rank that ended by itself."""
_BETWEEN: Final = "between sections"
Answer = TypeVar("Answer")


def has_peers() -> bool:
    """Return whether there are other ranks; a start path in one process has none."""
    return not dist.is_initialized() or dist.get_backend() != "fake"


class HeartbeatStore:
    """The part of the process group's store that holds heartbeats, and the states of ranks in each hang."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        store: Any = dist.distributed_c10d._get_default_store()
        with suppress(AttributeError, RuntimeError):  # of a torch, or a store, that does not make another client
            store = store.clone()  # a client waits for one answer at a time
            store.set_timeout(_STORE_TIMEOUT)
        self._store = PrefixStore("resiliency", store)

    def beat(self, state: RankState, number: int) -> bool:
        """Write the heartbeat of this rank; return whether another rank has noticed the hang with this number."""
        self._store.set(f"heartbeat/{self._rank}", json.dumps(asdict(state)))
        return bool(self._store.check([f"hang/{number}"]))

    def publish(self, number: int, state: RankState, is_known: bool) -> bool:
        """Publish the state of this rank in a hang, and the hang; return whether it is the first rank of its node."""
        self._store.set(f"state/{number}/{self._rank}", json.dumps(asdict(state)))
        if not is_known:
            self._store.set(f"hang/{number}", str(self._rank))
        return int(self._store.add(f"node/{number}/{state.host}/{state.machine}", 1)) == 1

    def states(self, number: int) -> dict[int, RankState]:
        """Return the states of all ranks; for ranks that have not noticed the hang, their last heartbeat."""
        states = {}
        for rank in range(self._size):
            for key, responds in ((f"state/{number}/{rank}", True), (f"heartbeat/{rank}", False)):
                if self._store.check([key]):
                    states[rank] = RankState(**json.loads(self._store.get(key)) | {"responds": responds})
                    break
        return states


class Watch:
    """Watch the heartbeat of this rank, from its first step on."""

    def __init__(self, heartbeat: Heartbeat, args: ResiliencyArgs) -> None:
        self.heartbeat, self.args = heartbeat, args
        self.interval = min(args.timeout / 8, _LONGEST_INTERVAL)
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._store = HeartbeatStore(self.rank, self.size) if dist.is_initialized() else None
        self._asking: threading.Thread | None = None
        self._loop = threading.get_ident()
        self._hangs = 0
        self._reported: float | None = None
        self._ended = threading.Event()
        self._log = _open_log(self.rank)
        heartbeat.since = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="mindspeed-resiliency", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the watch: the run ends, well or not."""
        self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(self.interval)
        faulthandler.cancel_dump_traceback_later()
        if self.heartbeat.monitor is not None:
            self.heartbeat.monitor.stop()

    def _run(self) -> None:
        self._look()
        looked = time.monotonic()
        while not self._ended.wait(self.interval):
            stopped = time.monotonic() - looked
            if stopped > self.interval + self.args.timeout / 2:
                self._print(f"rank {self.rank}: this process did not run for {stopped:.0f} s")
                self.heartbeat.since = time.monotonic()
            # if a call keeps the interpreter locked, this thread cannot report, but faulthandler can. The stacks that it reads
            # must not change meanwhile, so it waits until this thread would have looked again
            faulthandler.dump_traceback_later(self.args.timeout + 2 * self.interval + _SLACK, file=self._log)
            self._look()
            looked = time.monotonic()
        if self._reported is not None:  # a loop that went on may have ended before the next look
            self._look()

    def _look(self) -> None:
        state = self._state()
        is_asked = self._ask(lambda store: store.beat(state, self._hangs + 1)) or False
        if self._reported is not None:
            if self.heartbeat.since > self._reported:
                self._print(f"rank {self.rank}: the training loop goes on")
                self._reported = None
        elif is_asked or self._hangs_now():
            self._report(is_asked)

    def _hangs_now(self) -> bool:
        sections, idle = self.heartbeat.sections, time.monotonic() - self.heartbeat.since
        if "save" in sections:
            return idle > self.args.save_timeout
        if idle <= self.args.timeout:
            return False
        if sections:
            return True
        collective = last_collective()  # between two steps the loop may also write a report, for example
        return collective is not None and collective.pending

    def _state(self, with_collective: bool = False) -> RankState:
        heartbeat = self.heartbeat
        section = (heartbeat.sections or [_BETWEEN])[-1]
        idle = round(time.monotonic() - heartbeat.since, 1)
        state = RankState(heartbeat.step, section, idle, socket.gethostname(), os.getpid(), _machine())
        if not with_collective:
            return state
        collective = last_collective()
        frames = traceback.walk_stack(sys._current_frames()[self._loop])
        return replace(
            state,
            collective=str(collective or ""),
            pending=collective is not None and collective.pending,
            site=line_of((frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in frames),
        )

    def _report(self, is_asked: bool) -> None:
        """Write what this rank knows into the store and its log; the first rank of a node names those that lag."""
        self._reported = time.monotonic()
        state = self._state(with_collective=True)
        faulthandler.dump_traceback(self._log)
        number = self._hangs = self._hangs + 1
        is_first = self._ask(lambda store: store.publish(number, state, is_asked))
        self._ended.wait(2 * self.interval + 1)  # until the others have noticed it
        if is_first is not False:
            states = {self.rank: state} if self.size == 1 else self._ask(lambda store: store.states(number))
            log = self._log.name
            problem = problem_of(states, self.size, log) if states else without_store(state, self.rank, log)
            restarts = self.args.level == "restart"
            self._print(str(problem), to_terminal=not (restarts and LAUNCHED in os.environ))
            if restarts:
                self._kill_silent(states or {})
                leave_problems(RunError([problem]))
        elif self.args.level == "restart":  # a launcher ends all ranks with the first one, which must have left its problem
            self._ended.wait(_STORE_TIMEOUT.total_seconds())
        if self.args.level == "restart":
            sys.stdout.flush()
            os._exit(UNFINISHED)

    def _kill_silent(self, states: Mapping[int, RankState]) -> None:
        """Have ranks of this node that do not respond killed: a stopped process does not heed the SIGTERM of its launcher."""
        for state in states.values():
            if not state.responds and state.machine and state.machine == _machine():
                subprocess.Popen(["sh", "-c", _KILL_AFTER_TERM, str(state.process)], start_new_session=True)

    def _ask(self, question: Callable[[HeartbeatStore], Answer]) -> Answer | None:
        """Ask the store in another thread, which a process that keeps the store and has stopped would block; None then."""
        store = self._store
        if store is None or (self._asking is not None and self._asking.is_alive()):
            return None
        answers: list[Answer] = []

        def ask() -> None:
            with suppress(RuntimeError):  # the store has ended
                answers.append(question(store))

        self._asking = threading.Thread(target=ask, name="mindspeed-heartbeat", daemon=True)
        self._asking.start()
        self._asking.join(max(self.interval, _STORE_TIMEOUT.total_seconds()))
        return answers[0] if answers else None

    def _print(self, text: str, to_terminal: bool = True) -> None:
        """Print to the log of this rank; our launcher prints what a rank leaves before it ends."""
        for stream in {self._log, sys.stderr} if to_terminal else {self._log}:
            print(text, file=stream, flush=True)


def _machine() -> str:
    """Return the boot and the process namespace in which a process number means one process; '' where they are unknown."""
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _open_log(rank: int) -> IO[str]:
    """Open the log of this rank in the folder of the run; without a folder it is the standard error."""
    folder = run_folder()
    if folder is None:
        return sys.stderr
    path = Path(folder) / "logs" / f"rank{rank}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a", encoding="utf-8")
    except OSError:
        return sys.stderr
