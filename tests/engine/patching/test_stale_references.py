"""Who still holds an original after patching."""

import functools
import importlib
import sys
from dataclasses import dataclass
from typing import Any
from unittest.mock import MagicMock

import pytest

from mindspeed.engine.runtime.call_count import CallCount
from tests.engine.patching.patch_cases import ATTENTION, STATE, applied, mixin, replace, wrap
from tests.engine.patching.patch_fixtures import fake_megatron  # noqa: F401

pytestmark = pytest.mark.usefixtures("small_heap")


@pytest.fixture
def state(fake_megatron: object) -> Any:  # noqa: F811
    for name in ("megatron.core.transformer.layer", "glue", "layers"):
        importlib.import_module(name)
    return sys.modules[STATE]


def test_a_fully_rebound_tree_has_no_stale_holders(state: Any) -> None:
    patches = applied(
        replace(f"{STATE}:get_size", "layers:size_plus_one"),
        wrap(f"{STATE}:get_size", owner="beta"),
        wrap(f"{STATE}:scale"),
        replace(f"{ATTENTION}:Attention", "layers:RingAttention"),
        mixin(f"{ATTENTION}:SelfAttention"),
    )
    assert patches.audit() == []
    patches.undo()


def test_a_function_of_other_code_that_a_patch_replaces_is_named(state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def scale(x: int) -> int:
        return x

    monkeypatch.setattr(state, "scale", functools.wraps(state.scale)(scale))
    found = []
    for patch in (wrap(f"{STATE}:scale"), replace(f"{STATE}:scale", "layers:size_plus_one")):
        patches = applied(patch)
        found += patches.audit()
        patches.undo()
    assert list(map(str, found)) == [
        f"MS412 {__name__}.scale had replaced {STATE}:scale before alpha was activated, and is not called, because alpha "
        "replaces it too\n  fix: remove alpha, or do not load the code that put it there"
    ]


@pytest.mark.guards(13)
def test_closures_partials_methods_and_instances_that_hold_an_original_are_named(state: Any) -> None:
    attention = sys.modules[ATTENTION]
    captured = state.scale

    class Holder:
        def __init__(self, function: object) -> None:
            self.function = function

    def closing_over() -> object:
        return captured

    instance, holder, partial = attention.Attention(), Holder(state.scale), functools.partial(state.scale, 1)
    method = state.scale.__get__(5)
    patches = applied(wrap(f"{STATE}:scale"), mixin(f"{ATTENTION}:Attention", owner="beta"))
    found = patches.audit()
    patches.undo()
    here = f"{__name__}.test_closures_partials_methods_and_instances_that_hold_an_original_are_named.<locals>"
    function = f"still refers to the unpatched {STATE}:scale, so it runs without the patch of alpha"
    cls = f"{ATTENTION}:Attention"
    fix = "import mindspeed.megatron_adaptor, or call mindspeed.activate, before this object is created"
    assert [str(problem) for problem in found] == [
        (f"MS404 a bound method of builtins.int {function}\n  fix: {fix}"),
        (f"MS404 a partial {function}\n  fix: {fix}"),
        (
            f"MS404 an instance of {ATTENTION}.Attention still refers to the unpatched {cls}, so it runs without the "
            f"patch of beta\n  fix: {fix}"
        ),
        (f"MS404 an instance of {here}.Holder {function}\n  fix: {fix}"),
        (f"MS404 the closure of {here}.closing_over {function}\n  fix: {fix}"),
    ]
    del instance, holder, partial, method


def test_the_parts_of_an_original_that_is_a_mock_are_no_stale_holders(state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's classes over a Transformer Engine that is missing are mocks."""
    monkeypatch.setattr(state, "scale", MagicMock())
    patches = applied(replace(f"{STATE}:scale", "layers:size_plus_one"))
    assert patches.audit() == []
    patches.undo()


def test_a_partial_in_a_module_of_megatron_calls_what_is_patched(state: Any) -> None:
    """As ``custom_fwd`` of Megatron's layers is a partial of torch's."""
    original = state.scale
    state.scale_once = functools.partial(original, 3)
    patches = applied(wrap(f"{STATE}:scale"))
    assert patches.audit() == []
    assert (state.scale_once.func, state.scale_once.args) == (state.scale, (3,))
    assert state.scale is not original
    patches.undo()
    assert (state.scale_once.func, state.scale_once.args) == (original, (3,))


@dataclass
class Spec:
    held: object


def test_arguments_of_a_partial_are_exchanged(state: Any) -> None:
    """As the layers in the specs of a hybrid model, which are in dataclasses that a partial passes on."""
    original = state.scale
    state.built = functools.partial(print, original, spec=Spec(original))
    patches = applied(wrap(f"{STATE}:scale"))
    assert patches.audit() == []
    assert (state.built.args, state.built.keywords["spec"].held) == ((state.scale,), state.scale)
    assert state.scale is not original
    patches.undo()
    assert (state.built.args, state.built.keywords["spec"].held) == ((original,), original)


def test_a_wrapper_that_a_later_layer_has_replaced_is_no_stale_holder(state: Any) -> None:
    ground = wrap(f"{STATE}:scale", ground=True)
    patches = applied(ground, replace(f"{STATE}:scale", "layers:size_plus_one", owner="beta"))
    assert patches.audit() == []
    patches.undo()


def test_a_wrapper_whose_calls_are_counted_is_no_stale_holder(state: Any) -> None:
    patches = applied(wrap(f"{STATE}:scale", "glue:passed"))
    counting = CallCount(state.scale)
    try:
        assert patches.audit() == []
    finally:
        counting.stop()
        patches.undo()


def test_a_pending_or_undone_plan_has_no_stale_holders(fake_megatron: object) -> None:  # noqa: F811
    patches = applied(wrap(f"{STATE}:scale"))
    assert patches.audit() == []
    patches.undo()
    assert patches.audit() == []
