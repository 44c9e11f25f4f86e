"""Judge cases of the matrix side by side, those that need it most first, and keep every verdict as it comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from threading import local
from typing import Final

from mindspeed import registry
from mindspeed.workbench.verification.matrix.cases import MatrixCase
from mindspeed.workbench.verification.matrix.judge import judge
from mindspeed.workbench.verification.matrix.reach import Sources
from mindspeed.workbench.verification.matrix.reduction import with_culprits
from mindspeed.workbench.verification.matrix.store import VerdictStore, is_stale
from mindspeed.workbench.verification.matrix.verdicts import CaseResult
from mindspeed.workbench.verification.pool import SharedBroker, WorkerPool

AT_ONCE: Final = 2
"""Cases that are judged at the same time: the broker runs four ranks at once."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run: the latest verdict, and the remaining seconds."""

    result: CaseResult
    done: int
    total: int
    seconds_left: float


def to_judge(cases: Iterable[MatrixCase], known: Mapping[str, CaseResult], sources: Sources) -> list[MatrixCase]:
    """Select the cases without a verdict of these sources: failing ones first, then stale ones, then the others."""
    ranked = list[tuple[int, int, MatrixCase]]()
    for number, case in enumerate(cases):
        result = known.get(case.name)
        if result is None:
            ranked.append((2, number, case))
        elif is_stale(result, sources):
            ranked.append((0 if result.outcome.is_defect else 1, number, case))
    return [case for _, _, case in sorted(ranked, key=_rank)]


def _rank(entry: tuple[int, int, MatrixCase]) -> tuple[int, int]:
    return entry[:2]


@dataclass(slots=True)
class _Judges:
    """Judge cases in several threads, each with a pool of its own; all pools share a broker, until ``stack`` is closed."""

    store: VerdictStore
    sources: Sources
    end: float
    known: dict[str, CaseResult]
    stack: ExitStack
    _broker: SharedBroker = field(default_factory=SharedBroker)
    _of_thread: local = field(default_factory=local)

    def __post_init__(self) -> None:
        self.stack.callback(self._broker.close)

    def has_time(self) -> bool:
        return time.monotonic() < self.end

    def judge(self, case: MatrixCase) -> CaseResult:
        """Judge a case, and of a larger set that fails find the smallest failing part."""
        result = judge(case, self._pool, self.sources)
        is_reduced = result.outcome.is_defect and len(case.features) > 2 and self.has_time()
        return with_culprits(result, self._part) if is_reduced else result

    def _part(self, case: MatrixCase) -> CaseResult:
        """The verdict of a subset: the one that is known, else a new one, which is stored at once."""
        result = self.known.get(case.name)
        if result is None or is_stale(result, self.sources):
            result = self.known[case.name] = judge(case, self._pool, self.sources)
            self.store.add(result)
        return result

    @property
    def _pool(self) -> WorkerPool:
        if not hasattr(self._of_thread, "pool"):
            self._of_thread.pool = self.stack.enter_context(WorkerPool(address=self._broker.address))
        pool: WorkerPool = self._of_thread.pool
        return pool


def judge_all(
    cases: Sequence[MatrixCase],
    store: VerdictStore,
    sources: Sources,
    budget: float | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
) -> list[CaseResult]:
    """Judge these cases and store each verdict; none is begun after ``budget`` seconds where there is one.

    Sets of more than two features that fail are reduced to a smallest failing part, of which each subset has a verdict too.
    Raises RunError as `VerdictStore.hold` does.
    """
    registry.catalog()
    found: list[CaseResult] = []
    start = time.monotonic()
    with store.hold(), ExitStack() as stack:
        if not cases:
            return found
        judges = _Judges(store, sources, float("inf") if budget is None else start + budget, store.read(), stack)
        with ThreadPoolExecutor(AT_ONCE) as threads:
            for future in _as_they_come(threads, judges.judge, cases, judges.has_time):
                result = future.result()
                store.add(result)
                found.append(result)
                left = (time.monotonic() - start) / len(found) * (len(cases) - len(found))
                progress(Progress(result, len(found), len(cases), left))
    return found


def _as_they_come(
    threads: ThreadPoolExecutor,
    judge_one: Callable[[MatrixCase], CaseResult],
    cases: Sequence[MatrixCase],
    has_time: Callable[[], bool],
) -> Iterator[Future[CaseResult]]:
    """Begin a case whenever a thread is free and there is time; after Ctrl-C none is begun."""
    todo, running = iter(cases), set[Future[CaseResult]]()
    while True:
        while len(running) < AT_ONCE and has_time() and (case := next(todo, None)) is not None:
            running.add(threads.submit(judge_one, case))
        if not running:
            return
        done, running = wait(running, return_when=FIRST_COMPLETED)
        yield from done
