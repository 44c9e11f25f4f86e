"""Fixtures of the matrix's tests."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest

from mindspeed import registry
from mindspeed.verification.matrix.reach import Sources
from mindspeed.verification.matrix.store import VerdictStore
from tests.verification.matrix.planted import install


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Install features of planted kinds, by name, for this process and the ones that it starts; gives their folder."""

    def make(**kinds: str) -> Path:
        folder = tmp_path / "planted"
        folder.mkdir()
        install(folder, ((name.replace("_", "-"), kind) for name, kind in kinds.items()))
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.setattr(registry, "catalog", lru_cache(registry.catalog.__wrapped__))
        return folder

    return make


@pytest.fixture
def store(tmp_path: Path) -> VerdictStore:
    return VerdictStore(tmp_path / "verdicts.jsonl")


@pytest.fixture
def sources() -> Sources:
    return Sources(registry.catalog())
