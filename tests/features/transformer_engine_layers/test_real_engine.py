"""A Transformer Engine that is broken, that appears after the plan, or whose layers are replaced."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest
import torch

import mindspeed
from mindspeed.engine.resolution.environment import engine_installed
from mindspeed.problems import MindSpeedError
from tests.features.transformer_engine_layers.saved_keys import build
from tests.features.transformer_engine_layers.single_rank import single_rank

NAME: Final = "transformer-engine-layers"
NAMED: Final = Path(__file__).with_name("named_engine")
"""A folder with a ``transformer_engine`` whose classes have the parameters of the real ones."""


@pytest.fixture(autouse=True)
def _leaves_no_engine() -> Iterator[None]:
    yield
    mindspeed.deactivate()
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        del sys.modules[name]


def plan(*names: str, **settings: object) -> mindspeed.ActivationPlan:
    world = {"transformer_engine_layers": True}
    return mindspeed.plan([*names], settings={NAME: settings} if settings else {}, world=world, platform="cpu")


@pytest.mark.long
def test_modules_that_were_imported_before_the_plan_is_active_get_the_roles() -> None:
    """One of both imports a name from the other that exists with the roles alone."""
    user = "megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs"
    other = "megatron.core.transformer.heterogeneous.linear_replacements"
    mindspeed.activate(mindspeed.plan([], platform="cpu", level=0))
    specs, replacements = import_module(user), import_module(other)
    mindspeed.deactivate()
    mindspeed.activate(plan())
    kind = specs.TELayerNormColumnParallelLinearGathered
    assert kind is replacements.TELayerNormColumnParallelLinearGathered
    assert kind.__mro__[1].__module__ == "mindspeed.features.transformer_engine_layers.norm_linear"


@pytest.mark.long
def test_an_engine_that_is_installed_after_the_plan_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan()
    assert NAME in made.names
    monkeypatch.syspath_prepend(NAMED)
    with pytest.raises(MindSpeedError) as caught:
        mindspeed.activate(made)
    assert str(caught.value) == (
        "MS339 the plan was made without Transformer Engine, but it is installed now: "
        f"{NAMED}/transformer_engine/__init__.py\n"
        f"  where: {NAMED}/transformer_engine/__init__.py\n"
        "  fix: make the plan again; it then uses Transformer Engine"
    )
    assert NAME not in plan().names


@pytest.mark.long
def test_an_engine_that_was_imported_without_a_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan()
    import_module("megatron.core.utils")  # which asks for the version of a module that it finds
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    assert engine_installed()
    with pytest.raises(MindSpeedError, match="but it is installed now: transformer_engine"):
        mindspeed.activate(made)


def test_a_broken_engine_is_reported_with_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "transformer_engine"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(tmp_path)
    made = plan()
    assert NAME not in made.names
    with pytest.raises(MindSpeedError) as caught:
        mindspeed.activate(made)
    assert str(caught.value) == (
        "MS339 the job builds Transformer Engine's layers, but the installed Transformer Engine cannot be imported\n"
        "  because: OSError: libcudart.so.12: cannot open shared object file\n"
        f"  where: {broken}/__init__.py\n"
        "  fix: repair or uninstall Transformer Engine; without it, mindspeed builds compatible layers"
    )
    shutil.rmtree(broken)
    assert NAME in plan().names


@pytest.mark.long
def test_the_layers_of_an_installed_engine_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's own wrappers are loaded over the engine first, as in a process that needed it before."""
    monkeypatch.syspath_prepend(NAMED)
    made = plan(NAME, replace=True)
    mindspeed.activate(made)
    import transformer_engine
    from megatron.core.extensions import transformer_engine as wrappers

    assert transformer_engine.__file__ == f"{NAMED}/transformer_engine/__init__.py"
    with single_rank():
        model = build("llama", engine=True)
        tokens = torch.arange(8)[None]
        model(tokens, tokens, None, labels=tokens).sum().backward()
    kinds = {type(module) for module in model.modules() if type(module).__name__.startswith("TE")}
    names = ["TEDotProductAttention", "TELayerNormColumnParallelLinear", "TERowParallelLinear"]
    assert sorted(kind.__name__ for kind in kinds) == names
    assert all(issubclass(kind, getattr(wrappers, kind.__name__)) for kind in kinds)
    assert {kind.__module__.rpartition(".")[0] for kind in kinds} == {"mindspeed.features.transformer_engine_layers"}
    assert all(parameter.grad is not None for parameter in model.parameters())
