"""Fixtures of the whole test run: one pool of worker processes, and the proof that runs in it."""

import gc
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import settings

import mindspeed
from mindspeed.engine.resolution.request import Layer
from mindspeed.workbench.verification.case import build_case
from mindspeed.workbench.verification.harness import Verdict, verify
from mindspeed.workbench.verification.pool import SharedBroker, WorkerPool
from tests import covers, selection
from tests.budgets import POOL, Budgets, Durations
from tests.selection import Passed

settings.register_profile("ours", deadline=None)  # a busy machine is no failure
settings.load_profile("ours")

ROOT = Path(__file__).resolve().parents[1]
DISTRIBUTIONS: Final = ROOT / "tests" / "distributions"
"""Metadata of packages that tests have installed."""
sys.path.append(str(DISTRIBUTIONS))


# compiled modules are kept, whatever the shell says: a run rewrites the assertions of 500 files and starts a thousand processes
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

BROKER: Final = pytest.StashKey[SharedBroker]()


class OwnsBroker:
    """Keeps one broker for all processes of the test run, in the process that starts the others."""

    def pytest_configure(self, config: pytest.Config) -> None:
        config.stash[BROKER] = SharedBroker(search_path=[str(ROOT), str(DISTRIBUTIONS)])

    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["broker"] = node.config.stash[BROKER].address

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        config.stash[BROKER].close()


def pytest_addoption(parser: pytest.Parser) -> None:
    selection.add_options(parser)
    covers.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as the Makefile does: ranks that tests fork do not survive threads
    gc.set_threshold(100_000, 50, 1000)  # a tenth of the time went into looking through the objects of torch again and again
    config.pluginmanager.register(Budgets())
    config.pluginmanager.register(covers.Covers())
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(OwnsBroker())
        config.pluginmanager.register(Durations())
        config.pluginmanager.register(Passed(), "passed")


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure() -> None:
    gc.collect()
    gc.freeze()  # else pytest, which looks for errors in finalizers, looks through all objects of torch nine times more


@pytest.hookimpl(trylast=True)  # after the marks of -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    given = getattr(config, "workerinput", None)
    selection.select(config, items, given["passed"] if given else config.pluginmanager.getplugin("passed").before)


@pytest.fixture(scope="session")
def pool(pytestconfig: pytest.Config) -> Iterator[WorkerPool]:
    """Worker processes that stay for the whole run, four at a time; plans come and go in them."""
    given = getattr(pytestconfig, "workerinput", None)
    with WorkerPool(address=given["broker"] if given else pytestconfig.stash[BROKER].address) as pool:
        pytestconfig.stash[POOL] = pool
        yield pool


@dataclass(frozen=True)
class Prove:
    """``mindspeed features verify`` in the pool of the run: gives the verdict."""

    pool: WorkerPool

    def __call__(
        self,
        *features: str,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        world: Mapping[str, Any] | None = None,
        also: Sequence[str] = (),
        nproc: int | None = None,
        steps: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Verdict:
        layer = Layer("test", settings=settings or {}, world=world or {})
        case = build_case(features, [layer], also, nproc, options=options)
        if steps is not None:
            case = replace(case, recipe=replace(case.recipe, steps=steps))
        return verify(case, self.pool)


@pytest.fixture
def prove(pool: WorkerPool) -> Prove:
    return Prove(pool)


@pytest.fixture
def small_heap() -> Iterator[None]:
    """Hide from a walk of the heap what was there before the test: torch, Megatron and all tests take it a second."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def on_cpu() -> Iterator[None]:
    """The platform CPU, and nothing else, for the tests of a module."""
    mindspeed.activate(mindspeed.plan(platform="cpu"))
    yield
    mindspeed.deactivate()


def differences(verdict: Verdict) -> set[float | None]:
    """The differences of losses, gradients, weights and states; counted bytes have a bound of their own."""
    return {check.largest_difference for check in verdict.checks if not check.what.startswith("bytes of ")}
