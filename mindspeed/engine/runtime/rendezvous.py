"""From activation to the first process group: the ranks of a job agree on their plan, and hear of one that fails.

Where the launcher keeps a store (torchrun), the ranks meet in it when they activate. Elsewhere rank 0 opens the store
of ``init_process_group`` itself, a moment before torch does, and they meet there.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs, urlparse

from mindspeed.engine.planning.fingerprint import Content
from mindspeed.engine.runtime import agreement
from mindspeed.engine.runtime.meeting import MovedError, find_meeting, meeting, newest, open_meeting
from mindspeed.engine.runtime.presence import Presence
from mindspeed.problems import MindSpeedError, Problem, RunError
from mindspeed.process.error_file import LAUNCHED, leave_problems

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

JOINED: Final = "MINDSPEED_JOINED"
"""Environment variable that a rank sets for itself and its helpers: they are no ranks, and agree with nobody."""
GRACE: Final = timedelta(seconds=30)
"""Time in which a rank that failed looks for the store to publish its failure."""
ASKING: Final = timedelta(seconds=3)
"""Time in which a rank looks for the store to learn whether another rank prints the same problems."""
_NO_STORE: Final = ("mpi", "fake")


@dataclass(frozen=True, slots=True)
class RankAddress:
    """This process's place in a job, and the address where its ranks meet.

    ``kept``: the launcher keeps the store; else rank 0 does. ``restarts``: the launcher may start failed ranks again.
    """

    host: str
    port: int
    rank: int
    size: int
    kept: bool = False
    restarts: bool = False

    @property
    def serves(self) -> bool:
        """The store ends with this process."""
        return self.rank == 0 and not self.kept

    @property
    def name(self) -> str:
        """The name that helper processes of this rank inherit."""
        return f"{self.host}:{self.port}/{self.rank}"


def place_in(environ: Mapping[str, str]) -> RankAddress | None:
    """The place that a launcher has put into the environment; None without a launcher, and in a job of one rank."""
    try:
        rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    except (KeyError, ValueError):
        return None
    if size < 2:
        return None
    kept = environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    return RankAddress(host, port, rank, size, kept, environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0")


class Rendezvous:
    """The set-up of this process as one rank, from activation until its first process group is complete.

    Until the plan is withdrawn, `presence` then detects ranks whose process ends.
    """

    def __init__(self, content: Callable[[], Content], place: RankAddress | None, number: int) -> None:
        self._content, self.place, self._number = content, place, number
        self.agreed = False
        self.presence: Presence | None = None
        self._store: Store | None = None
        self._meeting: int | None = None
        self._told = threading.Event()
        self._stop = threading.Event()
        self._watch: threading.Thread | None = None

    def begin(self) -> None:
        """Agree at once where the launcher keeps a store. Raises RunError when the ranks differ."""
        if self.place is not None and self.place.kept:
            self.meet(self.place)

    def meet(self, place: RankAddress) -> None:
        """Agree in the store of a place, and watch it for ranks that fail or end. Raises RunError."""
        self.place = place
        while not self.agreed:
            self._store = self._enter(place)
            self.presence = self._join(self._store, place)
            watch = (place, self.presence)
            self._watch = threading.Thread(target=self._watch_ranks, args=watch, name="mindspeed-setup", daemon=True)
            self._watch.start()
            atexit.register(self.end)
            try:
                self.agree(self._store, place.rank, place.size)
            except MovedError as moved:
                self._leave()
                if place.rank == 0:
                    raise RunError([agreement.replaced()]) from moved

    def _enter(self, place: RankAddress) -> Store:
        """Connect to the store of a place and find the meeting of this start in it. Raises RunError."""
        seconds = timedelta(seconds=agreement.patience())
        try:
            store = self._connect(place, GRACE if place.kept else seconds)
        except RuntimeError as error:
            raise RunError([agreement.unreachable(place.host, place.port, str(error))]) from error
        try:
            if place.rank == 0:
                self._meeting = open_meeting(store)
            else:
                self._meeting = find_meeting(store, seconds, GRACE if place.restarts else timedelta(milliseconds=1))
        except RuntimeError as error:
            raise RunError([agreement.missing([0], place.size, agreement.patience())]) from error
        return meeting(store, self._meeting)

    def _join(self, store: Store, place: RankAddress) -> Presence:
        presence = Presence(place.rank, place.size, place.host)
        try:
            presence.join(store, agreement.patience() + agreement.SLACK)
        except RuntimeError as error:
            raise RunError([agreement.missing([0], place.size, agreement.patience() + agreement.SLACK)]) from error
        return presence

    def agree(self, store: Store, rank: int, size: int) -> None:
        """Agree in any store. Raises RunError."""
        try:
            agreement.agree(store, rank, size, self._content())
        except RunError:
            self._told.set()  # all ranks know
            raise
        except RuntimeError as error:
            if self.place is None or self._told.is_set():
                raise
            raise RunError([self._store_ended(self.place, str(error))]) from error
        self.agreed = True

    def reporter(self, error: BaseException) -> int | None:
        """Return the rank that prints an error, which is the first that asks; None in a job of one rank."""
        place = self.place
        if place is None:
            return None
        try:
            return agreement.reporter(self._store or self._connect_to_meeting(place, ASKING), place.rank, str(error))
        except Exception:  # without the others each rank prints
            return place.rank

    def report_failure(self, error: BaseException) -> None:
        """Publish why this rank ends, if it is the first to. Does not raise, and waits no longer than `GRACE` and a bit."""
        place = self.place
        if place is None or self._told.is_set():
            return
        self._told.set()
        try:
            store = self._store or self._connect_to_meeting(place, GRACE)
            agreement.publish_failure(store, agreement.failed_rank(place.rank, error), place.size, place.serves)
        except Exception as unreachable:  # what this rank died of matters more
            print(f"mindspeed: the other ranks could not be notified of the failure: {unreachable}", file=sys.stderr)

    def complete(self) -> None:
        """The process group is complete: the store is no longer read, and a rank that ends is no failure of the set-up."""
        self._told.set()
        self._store = None
        if self.presence is not None:
            self.presence.wake()

    def end(self) -> None:
        """The plan is withdrawn, or the process ends: other ranks no longer hear of this one."""
        self._told.set()
        self._store = None
        self._leave()

    def _leave(self) -> None:
        """Close the presence of this rank in a meeting, and its watch."""
        self._stop.set()
        if self.presence is not None and self._watch is not None and self._watch is not threading.current_thread():
            self.presence.wake()
            self._watch.join()
            self.presence.leave()
            atexit.unregister(self.end)
            self.presence = self._watch = None
            self._stop.clear()

    def store_of_later_start(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the store, rank and size with which a later start in one store makes its process group.

        torch would read the addresses that ranks of the earlier start have left under the same keys.
        """
        place, address = self.place, given.get("init_method") or "env://"
        if place is None or not place.kept or not self._meeting or given.get("store") is not None or address != "env://":
            return {}
        from torch.distributed import PrefixStore, TCPStore, constants  # type: ignore[attr-defined]

        timeout = given.get("timeout") or constants.default_pg_timeout
        store = TCPStore(place.host, place.port, None, False, timeout, wait_for_workers=False)
        return {"store": PrefixStore(f"start/{self._meeting}", store), "rank": place.rank, "world_size": place.size}

    def _connect(self, place: RankAddress, timeout: timedelta) -> Store:
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        store = TCPStore(place.host, place.port, None, place.serves, timeout, wait_for_workers=False, multi_tenant=place.serves)
        return PrefixStore(f"mindspeed/{place.size}/{self._number}", store)

    def _connect_to_meeting(self, place: RankAddress, timeout: timedelta) -> Store:
        """Return a further connection to the meeting of this rank, or, before it has one, to the newest."""
        store = self._connect(place, timeout)
        return meeting(store, newest(store) if self._meeting is None else self._meeting)

    def _watch_ranks(self, place: RankAddress, presence: Presence) -> None:
        """Look for ranks that fail, in the store, and for ranks that end; in the set-up end the process when there is one."""
        try:
            # a connection of its own, because a client waits for one answer at a time
            store: Store | None = self._connect_to_meeting(place, GRACE)
            while store is not None and not self._told.is_set() and not self._stop.is_set():
                self._watch_set_up(place, presence, store)
        except RuntimeError as error:
            if not self._stop.wait(1) and not self._told.is_set() and self.agreed:
                _end_process(RunError([self._store_ended(place, str(error))]), place.rank)
        store = None
        while not self._stop.is_set():
            presence.look(None)

    def _watch_set_up(self, place: RankAddress, presence: Presence, store: Store) -> None:
        """Ask the store for failures about twice a second in sum of a thousand ranks."""
        for rank in presence.look(max(0.5, place.size / 2000)):
            if not self._told.is_set() and 0 in (rank, place.rank):
                agreement.publish_failure(store, agreement.lost_rank(rank), place.size, serving=False)
        if self._told.is_set() or not self.agreed or (problem := agreement.failure(store)) is None:
            return
        error = RunError([problem])
        reporter = agreement.reporter(store, place.rank, str(error))
        if place.serves:
            agreement.wait_until_told(store, place.size, agreement.TOLD)
        else:
            agreement.acknowledge(store)
        _end_process(error, reporter)

    def _store_ended(self, place: RankAddress, reason: str) -> Problem:
        return agreement.unreachable(place.host, place.port, reason) if place.kept else agreement.lost_rank(0)


_setup: Rendezvous | None = None
_activations = 0
_reporters: dict[str, int | None] = {}
"""The ranks that print problems, by their text."""


def begin(content: Callable[[], Content], environ: Mapping[str, str] = os.environ) -> None:
    """Set-up begins with activation. Raises RunError with MS610, MS611 or MS612 when the ranks do not agree.

    ``content`` is asked for when there is somebody to agree with.
    """
    global _setup, _activations
    place = place_in(environ)
    if place is not None:
        if _is_helper(place):
            return
        os.environ[JOINED] = f"{place.name} {os.getpid()}"
    _activations += 1
    _setup = Rendezvous(content, place, _activations)
    _setup.begin()


def end() -> None:
    """The plan of this process is withdrawn."""
    global _setup
    if _setup is not None:
        _setup.end()
    _setup = None


def report_failure(error: BaseException, environ: Mapping[str, str] = os.environ) -> None:
    """Publish to the other ranks why this one ends, if its set-up is not complete."""
    if (setup := _set_up(environ)) is not None:
        if isinstance(error, MindSpeedError):
            _reporter_of(error, setup)  # now: the store may end with rank 0
        setup.report_failure(error)


def text_of(error: MindSpeedError, environ: Mapping[str, str] = os.environ) -> str:
    """The problems as this rank prints them: all of them in the first rank that has them, one line in the others."""
    return problem_lines(error, _reporter_of(error, _set_up(environ)), environ)


def _reporter_of(error: MindSpeedError, setup: Rendezvous | None) -> int | None:
    if str(error) not in _reporters and setup is not None:
        _reporters[str(error)] = setup.reporter(error)
    return _reporters.get(str(error))


def _set_up(environ: Mapping[str, str]) -> Rendezvous | None:
    """The set-up of this process, also of one that failed before it could begin."""
    global _setup
    if _setup is None and _activations == 0 and (place := place_in(environ)) is not None and not _is_helper(place):
        _setup = Rendezvous(dict, place, 1)
    return _setup


def _is_helper(place: RankAddress) -> bool:
    """Return whether this process is a helper of the rank, which has agreed already."""
    name, _, owner = os.environ.get(JOINED, "").rpartition(" ")
    return name == place.name and owner != str(os.getpid())


def problem_lines(error: MindSpeedError, reporter: int | None, environ: Mapping[str, str] = os.environ) -> str:
    """The problems, with the rank in front in a job of several, or one line for those that the rank ``reporter`` prints."""
    rank = environ.get("RANK") if environ.get("WORLD_SIZE", "1") != "1" else None
    name = f"rank {rank}: " if rank is not None else ""
    if rank is None or reporter is None or str(reporter) == rank:
        return "\n".join(f"{name}{problem.text(error.words)}" for problem in error.problems)
    first, *others = error.problems
    more = f" and {len(others)} more problem{'s' if len(others) > 1 else ''}" if others else ""
    return f"{name}{first.code} {first.message}{more}; rank {reporter} prints the details"


def lost_ranks(seconds: float = 0.0) -> list[int]:
    """Return the ranks whose process has ended. Waits up to ``seconds`` for the first connection that closes."""
    presence = _setup.presence if _setup is not None else None
    if presence is None:
        return []
    end = time.monotonic() + seconds
    while not presence.lost and time.monotonic() < end:
        time.sleep(0.02)
    return sorted(presence.lost)


def around_init(create: Callable[..., Any], given: dict[str, Any]) -> Any:
    """``init_process_group(**given)``, before which the ranks agree unless they have. Raises RunError."""
    setup = _setup
    if setup is None or str(given.get("backend")).lower() in _NO_STORE:
        return create(**given)
    try:
        if not setup.agreed:
            _meet_at_init(setup, given)
        result = create(**given | setup.store_of_later_start(given))
    except Exception as error:  # whatever it is, the other ranks are told before it ends this one
        setup.report_failure(error)
        raise
    setup.complete()
    return result


def _meet_at_init(setup: Rendezvous, given: dict[str, Any]) -> None:
    """Agree in the store that ``init_process_group`` is given, or in the one that it will make."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]
    from torch.distributed.rendezvous import rendezvous

    store, rank, size = given.get("store"), given.get("rank", -1), given.get("world_size", -1)
    if store is None:
        url = given.get("init_method") or "env://"
        if url.partition(":")[0] in ("env", "tcp"):
            place = _place_at(url, rank, size)
            if place is not None:
                setup.meet(place)
            return
        options = {"timeout": given["timeout"]} if given.get("timeout") is not None else {}
        store, rank, size = next(rendezvous(url, rank, size, **options))
        given.pop("init_method", None)
        given |= {"store": store, "rank": rank, "world_size": size}
    if size > 1:
        setup.agree(PrefixStore("mindspeed", store), rank, size)


def _place_at(url: str, rank: int, size: int) -> RankAddress | None:
    """The place that an ``env://`` or ``tcp://`` address means; None for one rank and for what torch will refuse."""
    parts = urlparse(url)
    words = {name: values[0] for name, values in parse_qs(parts.query).items()}
    given = {name: str(value) for name, value in (("RANK", rank), ("WORLD_SIZE", size)) if value >= 0}
    given |= {name.upper(): words[name] for name in ("rank", "world_size") if name in words}
    if parts.scheme == "tcp":
        return place_in({**given, "MASTER_ADDR": parts.hostname or "", "MASTER_PORT": str(parts.port)})
    return place_in({**os.environ, **given})


def _end_process(error: RunError, reporter: int) -> None:
    """End without the main thread, which may wait for a rank that is gone."""
    leave_problems(error)
    if LAUNCHED not in os.environ:
        sys.stdout.flush()
        print(problem_lines(error, reporter), file=sys.stderr, flush=True)
    time.sleep(0.1)
    os._exit(1)
