"""Fixtures of the matrix's tests."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mindspeed import registry
from mindspeed.workbench.verification.matrix.reach import Sources
from mindspeed.workbench.verification.matrix.store import VerdictStore
from tests.workbench.verification.matrix.planted import install


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Install features of planted kinds, by name, for this process and the ones that it starts; gives their folder."""

    def make(**kinds: str) -> Path:
        folder = tmp_path / "planted"
        folder.mkdir()
        install(folder, ((name.replace("_", "-"), kind) for name, kind in kinds.items()))
        monkeypatch.syspath_prepend(str(folder))
        registry.catalog.cache_clear()
        return folder

    yield make
    monkeypatch.undo()
    for name in [name for name in sys.modules if name.startswith("planted_")]:
        del sys.modules[name]
    registry.catalog.cache_clear()


@pytest.fixture
def store(tmp_path: Path) -> VerdictStore:
    return VerdictStore(tmp_path / "verdicts.jsonl")


@pytest.fixture
def sources() -> Sources:
    return Sources(registry.catalog())
