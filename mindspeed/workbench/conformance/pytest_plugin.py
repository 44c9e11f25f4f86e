"""The pytest plugin: ``pytest --mindspeed-dist NAME``, and the fixtures ``fake_megatron`` and ``on_ranks``.

Loaded by every pytest run that has mindspeed installed, so it imports nothing but pytest until it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from mindspeed.workbench.conformance.fake_megatron import FakeMegatron
    from mindspeed.workbench.conformance.suite import Suite

_PARITY = "--mindspeed-parity"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mindspeed", "features of mindspeed")
    group.addoption(
        "--mindspeed-dist",
        action="append",
        default=[],
        metavar="NAME",
        help="Also test the features of an installed distribution, or one feature; may be repeated",
    )
    group.addoption(_PARITY, action="store_true", help="Also train a small model with and without each tested feature")


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    for name in config.getoption("--mindspeed-dist"):
        for feature, check in cases(name):
            items.append(_Item.from_parent(session, name=f"{feature}: {check}", subject=(name, feature, check)))


class _Item(pytest.Item):
    """Run one check of one feature."""

    def __init__(self, *, subject: tuple[str, str, str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.subject = subject

    def runtest(self) -> None:
        judge(*self.subject, parity=bool(self.config.getoption(_PARITY)))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> str:
        return str(excinfo.value) if isinstance(excinfo.value, AssertionError) else str(super().repr_failure(excinfo))

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.name


def cases(name: str) -> list[tuple[str, str]]:
    """``(feature, check)`` of everything that is tested of a distribution or feature."""
    from mindspeed.workbench.conformance.subjects import rows_of
    from mindspeed.workbench.conformance.suite import CHECKS

    return [(row.name, check) for row in rows_of(name) for check in CHECKS]


@lru_cache(maxsize=8)
def _suite(name: str, parity: bool) -> Suite:
    from mindspeed.workbench.conformance.suite import Suite

    return Suite(name, parity)


def judge(name: str, feature: str, check: str, parity: bool) -> None:
    """Pass, skip or fail the running test by the outcome of one check."""
    suite = _suite(name, parity)
    outcome = next(suite.outcome(subject, check) for subject in suite.tested if subject.name == feature)
    if outcome is None:
        pytest.skip("the feature cannot be loaded; see its metadata")
    if outcome.state == "not run":
        pytest.skip(outcome.text)
    if outcome.state == "failed":
        raise AssertionError(str(outcome))


@pytest.fixture
def fake_megatron(tmp_path: Path) -> Iterator[Callable[..., FakeMegatron]]:
    """``fake_megatron("module:qualname", ...)``: a made-up Megatron with these names until the test ends.

    ``sources={"megatron.core.utils": "..."}`` gives the text of whole modules.
    """
    from mindspeed.workbench.conformance.fake_megatron import fake_megatron as made_up

    with ExitStack() as stack:

        def make(*targets: str, sources: Mapping[str, str] | None = None) -> FakeMegatron:
            folder = tmp_path / "fake_megatron"
            folder.mkdir()
            return stack.enter_context(made_up(folder, *targets, sources=sources))

        yield make


@pytest.fixture(scope="session")
def on_ranks() -> Iterator[Callable[..., list[Any]]]:
    """``on_ranks(2, function, *arguments)``: the results of a top-level function on every rank of a gloo group, by rank.

    With ``plan=`` that plan is active and Megatron's groups exist. The processes stay for the whole test run. An error of
    a rank is raised here as RunError.
    """
    from mindspeed.workbench.verification.pool import WorkerPool

    pools: list[WorkerPool] = []

    def run(count: int, function: Callable[..., Any], *arguments: Any, plan: Any = None) -> list[Any]:
        if not pools:
            pools.append(WorkerPool())
        return pools[-1].call(function, count, *arguments, plan=plan)

    yield run
    for pool in pools:
        pool.close()
