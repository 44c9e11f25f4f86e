"""How far the engine looks for other holders of what it patches: as far as there are any, and no farther."""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed

from mindspeed.patching import reference_counts
from mindspeed.patching.aliases import Rebinder
from tests.patching.patch_cases import ATTENTION, STATE, applied, mixin, put, replace, wrap
from tests.patching.patch_fixtures import fake_megatron  # noqa: F401

FAR = "a_module_that_knows_megatron"


@pytest.fixture
def attention(fake_megatron: object) -> Any:  # noqa: F811
    for name in ("megatron.core.transformer.layer", "glue"):
        importlib.import_module(name)
    return sys.modules[ATTENTION]


@pytest.fixture
def far(attention: Any, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of a package that has nothing to do with Megatron, but for what a test puts there."""
    module = ModuleType(FAR)
    monkeypatch.setitem(sys.modules, FAR, module)
    return module


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry for every time that all modules were searched."""
    times: list[bool] = []
    search = Rebinder._search_far

    def noted(rebinder: Rebinder, near: Iterable[str]) -> None:
        times.append(True)
        search(rebinder, set(near))

    monkeypatch.setattr(Rebinder, "_search_far", noted)
    return times


def in_a_list(module: ModuleType, value: Any) -> Callable[[], Any]:
    module.__dict__["held"] = [value]
    module.__dict__["known"] = sys.modules["megatron.core"]
    return lambda: module.__dict__["held"][0]


def under_another_name(module: ModuleType, value: Any) -> Callable[[], Any]:
    module.__dict__["other"] = value
    return lambda: module.__dict__["other"]


def under_its_own_name(module: ModuleType, value: Any) -> Callable[[], Any]:
    module.__dict__[value.__name__] = value
    return lambda: module.__dict__[value.__name__]


def in_a_default(module: ModuleType, value: Any) -> Callable[[], Any]:
    exec("import megatron.core\ndef call(function=None): return function", module.__dict__)
    function = module.__dict__["call"]
    function.__defaults__ = (value,)
    return lambda: function.__defaults__[0]


HOLDERS = [in_a_list, under_another_name, under_its_own_name, in_a_default]


@pytest.mark.parametrize("hold", HOLDERS)
@pytest.mark.parametrize("target", [f"{STATE}:initialize", f"{ATTENTION}:Attention"])
@pytest.mark.guards(13)
def test_a_holder_in_a_module_of_any_package_follows(hold: Any, target: str, attention: Any, far: ModuleType) -> None:
    module, _, name = target.partition(":")
    original = vars(sys.modules[module])[name]
    held = hold(far, original)
    patches = applied(wrap(target) if name == "initialize" else mixin(target))
    assert held() is vars(sys.modules[module])[name] is not original
    patches.undo()
    assert held() is original


def test_modules_that_can_hold_nothing_more_are_not_searched(attention: Any, searched: list[bool]) -> None:
    applied(wrap(f"{STATE}:initialize"), wrap(f"{ATTENTION}:Base.shape"), mixin(f"{ATTENTION}:SelfAttention")).undo()
    assert len(searched) == 1, "undo searches all, as what it takes back may have gone anywhere"


def test_one_unknown_holder_has_all_modules_searched(attention: Any, far: ModuleType, searched: list[bool]) -> None:
    under_another_name(far, sys.modules[STATE].initialize)
    applied(wrap(f"{STATE}:initialize")).undo()
    assert len(searched) == 2


def test_an_instance_has_all_modules_searched(attention: Any, searched: list[bool]) -> None:
    instance = attention.SelfAttention.__new__(attention.SelfAttention)
    applied(mixin(f"{ATTENTION}:SelfAttention")).undo()
    assert len(searched) == 2
    del instance


def test_the_name_of_an_original_in_the_module_of_its_replacement_is_no_unknown_holder(
    attention: Any, searched: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["glue"], "original_initialize", sys.modules[STATE].initialize, raising=False)
    applied(replace(f"{STATE}:initialize", "glue:size_of_7")).undo()
    assert len(searched) == 1


def test_an_annotation_is_no_unknown_holder(attention: Any, searched: list[bool]) -> None:
    attention.attend.__annotations__["core"] = list[attention.SelfAttention]
    applied(mixin(f"{ATTENTION}:SelfAttention")).undo()
    del attention.attend.__annotations__["core"]
    assert len(searched) == 1


@pytest.mark.guards(13)
def test_a_dataclass_that_is_derived_later_has_the_patched_default(attention: Any) -> None:
    original = attention.Submodules().core
    patches = applied(mixin(f"{ATTENTION}:Attention"))
    derived = dataclasses.dataclass(type("Derived", (attention.Submodules,), {}))
    assert derived().core is attention.Attention is not original
    patches.undo()
    assert dataclasses.dataclass(type("Derived", (attention.Submodules,), {}))().core is original


@pytest.mark.guards(13)
def test_an_attribute_of_a_class_follows_also_where_another_module_imports_the_class_first(attention: Any) -> None:
    first = ModuleType("megatron.first")
    sys.modules["megatron.first"] = first
    second = ModuleType("megatron.second")
    sys.modules["megatron.second"] = second
    second.__dict__["initialize"] = sys.modules[STATE].initialize
    exec("class Holder:\n    initialize = initialize", second.__dict__)
    first.__dict__["Holder"] = second.__dict__["Holder"]
    patches = applied(wrap(f"{STATE}:initialize"))
    assert second.__dict__["Holder"].__dict__["initialize"] is sys.modules[STATE].initialize
    patches.undo()


COUNTED = """
from mindspeed.patching import reference_counts
import dataclasses, typing
class Upper:
    def method(self): return __class__
    @property
    def shown(self): return __class__
    @staticmethod
    def made(): return __class__
class Middle(Upper): pass
class Lower(Middle): pass
class Slots:
    __slots__ = ("a", "b")
@dataclasses.dataclass
class Data:
    a: int = 1
def function(): pass
known = {name: reference_counts.elsewhere(value) for name, value in list(globals().items()) if name in NAMES}
value = None
print(known)
"""


def test_every_reference_to_a_class_but_its_names_is_known() -> None:
    names = ["Upper", "Middle", "Lower", "Slots", "Data", "function"]
    script = COUNTED.replace("NAMES", repr(names))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert reference_counts.EXACT
    # the name and the pair in the list of names; the variable of the comprehension is not counted
    assert set(eval(done.stdout).values()) == {2}


def test_a_flag_is_found_under_its_own_name_where_it_is_imported_and_nowhere_else(far: ModuleType, tmp_path: Path) -> None:
    state = sys.modules[STATE]
    assert state.HAVE_FAST is False
    text = {"importing": f"from {STATE} import HAVE_FAST\n", "defining": "HAVE_FAST = False\n"}
    for name, source in text.items():
        module = ModuleType(name)
        module.__file__ = str(tmp_path / f"{name}.py")
        Path(module.__file__).write_text(source, encoding="utf-8")
        exec(source, vars(module))
        sys.modules[name] = module
    for _ in range(2):  # the second time from what was remembered
        patches = applied(put(f"{STATE}:HAVE_FAST", True))
        assert [sys.modules[name].HAVE_FAST for name in text] == [True, False]
        patches.undo()
        assert [sys.modules[name].HAVE_FAST for name in text] == [False, False]
    for name in text:
        del sys.modules[name]


def test_a_function_that_its_package_exports_again_has_only_that_package_searched(
    attention: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    search = Rebinder._search_namesakes

    def noted(rebinder: Rebinder, near_home: bool = False) -> None:
        asked.append(near_home)
        search(rebinder, near_home)

    monkeypatch.setattr(Rebinder, "_search_namesakes", noted)
    patches = applied(wrap("torch.distributed.distributed_c10d:init_process_group"))
    assert asked == [True]
    assert torch.distributed.init_process_group is torch.distributed.distributed_c10d.init_process_group
    patches.undo()
