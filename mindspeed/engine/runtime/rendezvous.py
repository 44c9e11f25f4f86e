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
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs, urlparse

from mindspeed.engine.planning.fingerprint import Content
from mindspeed.engine.runtime import agreement
from mindspeed.engine.runtime.error_file import LAUNCHED, leave_problems
from mindspeed.plugins.problems import RunError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

JOINED: Final = "MINDSPEED_JOINED"
"""Environment variable that a rank sets for itself and its helpers: they are no ranks, and agree with nobody."""
GRACE: Final = timedelta(seconds=30)
"""Time in which a rank that failed looks for the store to publish its failure."""
_NO_STORE: Final = ("mpi", "fake")


@dataclass(frozen=True, slots=True)
class RankAddress:
    """This process's place in a job, and the address where its ranks meet.

    ``kept``: the launcher keeps the store; else rank 0 does. ``attempt`` tells restarts of one job apart.
    """

    host: str
    port: int
    rank: int
    size: int
    kept: bool = False
    attempt: str = "0"

    @property
    def name(self) -> str:
        """The name that helper processes of this rank inherit."""
        return f"{self.host}:{self.port}/{self.attempt}/{self.rank}"


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
    attempt = f"{environ.get('TORCHELASTIC_RUN_ID', '')}.{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return RankAddress(host, port, rank, size, kept, attempt)


class Rendezvous:
    """The set-up of this process as one rank, from activation until its first process group is complete."""

    def __init__(self, content: Callable[[], Content], place: RankAddress | None, number: int) -> None:
        self._content, self.place, self._number = content, place, number
        self.agreed = False
        self._store: Store | None = None
        self._told = threading.Event()
        self._stop = threading.Event()
        self._watch: threading.Thread | None = None
        self._hook: Callable[..., Any] | None = None

    def begin(self) -> None:
        """Agree at once where the launcher keeps a store. Raises RunError when the ranks differ."""
        if self.place is None:
            return
        self._hook, sys.excepthook = sys.excepthook, self._uncaught
        if self.place.kept:
            self.meet(self.place)

    def meet(self, place: RankAddress) -> None:
        """Agree in the store of a place, and watch it for ranks that fail. Raises RunError."""
        self.place = place
        try:
            self._store = self._connect(place, GRACE if place.kept else timedelta(seconds=agreement.patience()))
        except RuntimeError as error:
            raise RunError([agreement.unreachable(place.host, place.port, str(error))]) from error
        self.agree(self._store, place.rank, place.size)
        self._watch = threading.Thread(target=self._look_for_failures, name="mindspeed-setup", daemon=True)
        self._watch.start()
        atexit.register(self.end)

    def agree(self, store: Store, rank: int, size: int) -> None:
        """Agree in any store. Raises RunError."""
        try:
            agreement.agree(store, rank, size, self._content())
        except RunError:
            self._told.set()  # all ranks know
            raise
        self.agreed = True

    def report_failure(self, error: BaseException) -> None:
        """Publish why this rank ends, if it is the first to. Does not raise, and waits no longer than `GRACE` and a bit."""
        place = self.place
        if place is None or self._told.is_set():
            return
        self._told.set()
        try:
            store = self._store or self._connect(place, GRACE)
            serving = place.rank == 0 and not place.kept
            agreement.publish_failure(store, agreement.failed_rank(place.rank, error), place.size, serving)
        except Exception as unreachable:  # what this rank died of matters more
            print(f"mindspeed: the other ranks could not be notified of the failure: {unreachable}", file=sys.stderr)

    def end(self) -> None:
        """The setup is over: the store is no longer read."""
        self._told.set()
        self._stop.set()
        if self._watch is not None and self._watch is not threading.current_thread():
            self._watch.join()
            atexit.unregister(self.end)
        self._watch = self._store = None
        if self._hook is not None and sys.excepthook == self._uncaught:
            sys.excepthook = self._hook  # else somebody's hook, such as torch's, calls ours, which goes on to the one before

    def _connect(self, place: RankAddress, timeout: timedelta) -> Store:
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        server = place.rank == 0 and not place.kept
        store = TCPStore(place.host, place.port, None, server, timeout, wait_for_workers=False, multi_tenant=server)
        return PrefixStore(f"mindspeed/{place.attempt}/{place.size}/{self._number}", store)

    def _look_for_failures(self) -> None:
        """Ask the store for failures about twice a second in sum of a thousand ranks; end the process when there is one."""
        place, store = self.place, self._store
        if place is None or store is None:
            return
        while not self._stop.wait(max(0.5, place.size / 2000)):
            try:
                problem = agreement.failure(store)
                if problem is None or self._told.is_set():
                    continue
                agreement.acknowledge(store)
            except RuntimeError:
                return  # the store has ended, and with it the job
            _end_process(RunError([problem]))

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if self._hook is not None:
            self._hook(kind, error, trace)
        if issubclass(kind, Exception):
            self.report_failure(error)


_setup: Rendezvous | None = None
_activations = 0


def begin(content: Callable[[], Content], environ: Mapping[str, str] = os.environ) -> None:
    """Set-up begins with activation. Raises RunError with MS610, MS611 or MS612 when the ranks do not agree.

    ``content`` is asked for when there is somebody to agree with.
    """
    global _setup, _activations
    place = place_in(environ)
    if place is not None:
        owner = f"{place.name} {os.getpid()}"
        if os.environ.get(JOINED, owner).rpartition(" ")[0] == place.name and os.environ.get(JOINED, owner) != owner:
            return  # a helper of the rank, which has agreed already
        os.environ[JOINED] = owner
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
    setup = _setup
    if setup is None and _activations == 0 and (place := place_in(environ)) is not None:
        setup = Rendezvous(dict, place, 1)  # it failed before it could begin
    if setup is not None:
        setup.report_failure(error)


def around_init(create: Callable[..., Any], given: dict[str, Any]) -> Any:
    """``init_process_group(**given)``, before which the ranks agree unless they have. Raises RunError."""
    setup = _setup
    if setup is None or str(given.get("backend")).lower() in _NO_STORE:
        return create(**given)
    try:
        if not setup.agreed:
            _meet_at_init(setup, given)
        result = create(**given)
    except Exception as error:  # whatever it is, the other ranks are told before it ends this one
        setup.report_failure(error)
        raise
    setup.end()
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


def _end_process(error: RunError) -> None:
    """End without the main thread, which may wait for a rank that is gone."""
    leave_problems(error)
    if LAUNCHED not in os.environ:
        sys.stdout.flush()
        print(error, file=sys.stderr, flush=True)
    time.sleep(0.1)
    os._exit(1)
