"""Every alias of what is patched follows, in modules of any package."""

import dataclasses
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed

from mindspeed.engine.patching.aliases import module_dictionaries
from tests.engine.patching.patch_cases import ATTENTION, STATE, applied, mixin, put, replace, wrap
from tests.engine.patching.patch_fixtures import fake_megatron  # noqa: F401

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


def test_a_function_that_its_package_exports_again_follows(attention: Any) -> None:
    patches = applied(wrap("torch.distributed.distributed_c10d:init_process_group"))
    assert torch.distributed.init_process_group is torch.distributed.distributed_c10d.init_process_group
    patches.undo()


def test_a_name_of_torch_for_another_one_leads_only_to_modules_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.cuda.is_initialized
    modules = {"torch.names_it": {"name": before, "held": [before]}, "torch.only_holds_it": {"held": [before]}}
    for name, entries in modules.items():
        module = ModuleType(name)
        vars(module).update(entries)
        monkeypatch.setitem(sys.modules, name, module)
    patches = applied(replace("torch.cuda:is_initialized", "torch:is_tensor"))
    assert [vars(sys.modules[name])["held"] for name in modules] == [[torch.cuda.is_initialized], [before]]
    patches.undo()
    assert torch.cuda.is_initialized is before


class ClaimsToBeAModule:
    """An entry of ``sys.modules`` as the libraries of cffi leave there."""

    @property
    def __class__(self) -> type:
        return ModuleType


def test_what_only_claims_to_be_a_module_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "_binding.lib", ClaimsToBeAModule())
    assert module_dictionaries(["_binding.lib", "sys"]) == [("sys", vars(sys))]
