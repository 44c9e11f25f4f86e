"""MegatronAdaptor in the same process, by a stand-in with its public name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import wraps
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Final

import pytest

import mindspeed
from mindspeed.problems import MindSpeedError

ADAPTOR: Final = "megatron_adaptor"
MODULE: Final = "megatron.core.fusions.fused_bias_swiglu"
NAME: Final = "swiglu"


@pytest.fixture(autouse=True)
def _leaves_no_adaptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / f"{ADAPTOR}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    mindspeed.deactivate()
    sys.modules.pop(ADAPTOR, None)


def patched_by_adaptor(original: Any) -> Any:
    """Return a wrapper whose code is in a module of MegatronAdaptor's."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    own = FunctionType(call.__code__, {"__name__": f"{ADAPTOR}.core.patches"}, "call", None, call.__closure__)
    return wraps(original)(own)


@pytest.mark.long
def test_what_was_patched_before_stays_and_the_plan_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    before = mindspeed.plan([], platform="cpu", level=0)
    mindspeed.activate(before)
    owner = import_module(MODULE)
    mindspeed.deactivate()
    monkeypatch.setitem(sys.modules, ADAPTOR, ModuleType(ADAPTOR))
    own = patched_by_adaptor(getattr(owner, NAME))
    monkeypatch.setattr(owner, NAME, own)
    made = mindspeed.plan([], platform="cpu", level=0)
    target = f"{MODULE}:{NAME}"
    assert {p.patch.target for p in before.patches} - {p.patch.target for p in made.patches} == {target}
    notes = [row.text for row in made.rows if ADAPTOR in row.text]
    assert notes == [f"megatron_adaptor was imported first and keeps what it patches: {target}"]
    mindspeed.activate(made)
    assert getattr(owner, NAME) is own


def test_it_is_not_imported_over_an_active_plan() -> None:
    mindspeed.activate(mindspeed.plan([], platform="cpu", level=0))
    with pytest.raises(MindSpeedError) as caught:
        import_module(ADAPTOR)
    where = find_spec_of(ADAPTOR)
    assert str(caught.value) == (
        "MS519 Ascend's MegatronAdaptor (module megatron_adaptor) is imported while a plan of mindspeed is active, and would "
        "replace patches of the plan\n"
        f"  where: {where}\n"
        "  fix: put 'import megatron_adaptor' before 'import mindspeed.megatron_adaptor', or delete 'import megatron_adaptor'"
    )
    mindspeed.deactivate()
    assert import_module(ADAPTOR).__file__ == where


def find_spec_of(name: str) -> str:
    """Return the file of a module that is not imported."""
    found = PathFinder.find_spec(name)
    assert found is not None
    return str(found.origin)
