"""Sources and a cache of a library of C++ operators."""

from pathlib import Path

import pytest

from tests.ops.built import write_sources


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    return write_sources(tmp_path / "csrc")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"
