"""A fake megatron in place of the real one, for one test."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TREE = Path(__file__).resolve().parents[2] / "fake_megatron"
_FAKES = ("megatron", "fakelib", "glue", "layers", "circular_glue")


@pytest.fixture
def fake_megatron(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Put the fake tree first on ``sys.path`` with none of its modules imported; afterwards all is as before."""
    hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in _FAKES}
    for name in hidden:
        del sys.modules[name]
    monkeypatch.syspath_prepend(str(TREE))
    finders = list(sys.meta_path)
    yield TREE
    left = [finder for finder in sys.meta_path if finder not in finders]
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.partition(".")[0] in _FAKES]:
        del sys.modules[name]
    sys.modules.update(hidden)
    assert not left, "a test left its patches behind"
