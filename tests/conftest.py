"""Fixtures of the whole test run: one pool of worker processes, and the proof that runs in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest
from hypothesis import settings

from mindspeed.resolution.request import Layer
from mindspeed.verification.case import build_case
from mindspeed.verification.harness import Verdict, verify
from mindspeed.verification.pool import WorkerPool

settings.register_profile("ours", deadline=None)  # a busy machine is no failure
settings.load_profile("ours")

ROOT = Path(__file__).resolve().parents[1]


class Pools:
    """The pool of the test run; one that ended, because a test ended it or a worker died, is replaced."""

    def __init__(self) -> None:
        self._pool: WorkerPool | None = None

    def usable(self) -> WorkerPool:
        if self._pool is None or self._pool.ended is not None:
            self._pool = WorkerPool(search_path=[str(ROOT)])
        return self._pool

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture
def pool(pools: Pools) -> WorkerPool:
    """Worker processes that stay for the whole run; plans come and go in them."""
    return pools.usable()


class Prove(Protocol):
    def __call__(
        self,
        *features: str,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        world: Mapping[str, Any] | None = None,
        also: Sequence[str] = (),
        nproc: int | None = None,
        steps: int | None = None,
    ) -> Verdict: ...


@pytest.fixture
def prove(pool: WorkerPool) -> Prove:
    """``mindspeed features verify`` in the pool of the run: gives the verdict."""

    def prove(
        *features: str,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        world: Mapping[str, Any] | None = None,
        also: Sequence[str] = (),
        nproc: int | None = None,
        steps: int | None = None,
    ) -> Verdict:
        layer = Layer("test", settings=settings or {}, world=world or {})
        case = build_case(features, [layer], also, nproc)
        if steps is not None:
            case = replace(case, recipe=replace(case.recipe, steps=steps))
        return verify(case, pool)

    return prove
