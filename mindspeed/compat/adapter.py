"""An old feature as a real one: its arguments become settings, its checks a condition, its patches the plan's patches."""

from __future__ import annotations

import argparse
import traceback
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Final, Literal, cast

from pydantic import ConfigDict, Field, create_model

from mindspeed.compat import object_refs
from mindspeed.compat.arguments import namespace_of
from mindspeed.compat.feature import MindSpeedFeature
from mindspeed.compat.patches import MindSpeedPatchesManager
from mindspeed.compat.registrations import Registration, require_patches
from mindspeed.plugins import (
    After,
    Category,
    Condition,
    Feature,
    FeatureArgs,
    FeatureSpec,
    Numerics,
    Patch,
    Stability,
    UnknownValue,
    World,
    condition,
    hookimpl,
)
from mindspeed.problems import Fix, MindSpeedError, Problem, advice

PREFIX: Final = "compat:"
"""Every feature in MindSpeed's form has it before its name, so that it never shadows one of ours."""


class OldArgs(FeatureArgs):
    """Base of the argument model of an old feature."""

    model_config = ConfigDict(protected_namespaces=())


class OldFeature(Feature[OldArgs]):
    """Base of the adapters. ``legacy`` is the feature as its author wrote it."""

    legacy: MindSpeedFeature
    common: Callable[[], Namespace | None]
    """The arguments that all features of the list share at this moment, or None when each has its own."""
    force_overridden: frozenset[Registration] = frozenset()
    """Replacements that give way to forced ones of later features."""

    def __init__(self, args: OldArgs, world: World) -> None:
        super().__init__(args, world)
        object_refs.provide(self.spec.name, self.patches)

    @hookimpl
    def patches(self) -> list[Patch]:
        """Let the feature register its patches. Raises MindSpeedError for unsupported ones."""
        return require_patches([call for call in registrations_of(self) if call not in self.force_overridden])


def name_of(feature: MindSpeedFeature) -> str:
    """The name in plans and reports: ``compat:acme-rope``."""
    return PREFIX + feature.feature_name.replace("_", "-")


def adapt(
    feature: MindSpeedFeature,
    after: Sequence[str] = (),
    common: Callable[[], Namespace | None] = lambda: None,
    force_overridden: frozenset[Registration] = frozenset(),
) -> type[OldFeature]:
    """A feature class that does what an object in MindSpeed's form does. ``after`` names those before it in its list."""
    kind = type(feature)
    spec = FeatureSpec(
        name=name_of(feature),
        category=Category.SCENARIO,
        level=2 if feature.optimization_level >= 2 else 0,
        constraints=(*(After(name) for name in after), _accepts(feature, common)),
        numerics=Numerics.approximate(1.0, 1.0, "it was written for MindSpeed and states no numerics claim"),
        stability=Stability.EXPERIMENTAL,
    )
    entries = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__ or "Run a feature in MindSpeed's form.",
        "spec": spec,
        "legacy": feature,
        "common": staticmethod(common),
        "force_overridden": force_overridden,
    }
    adapter = cast("type[OldFeature]", type(kind.__name__, (OldFeature,), entries))
    adapter.Args = _model(feature)  # afterwards: a new Feature class takes the model that its base names
    return adapter


def own_arguments(feature: MindSpeedFeature) -> list[argparse.Action]:
    """The arguments that a feature registers; none for one that fails to, which is a broken row of the catalog."""
    try:
        return _registered(feature)
    except Exception:  # foreign code may fail in any way
        return []


def _registered(feature: MindSpeedFeature) -> list[argparse.Action]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, conflict_handler="resolve")
    feature.register_args(parser)
    return [action for action in parser._actions if action.option_strings]


def registrations_of(adapter: OldFeature) -> list[Registration]:
    """Collect the registrations of a feature for its settings and world."""
    feature = adapter.legacy
    values = arguments_for(feature, adapter.args, adapter.world, type(adapter).common())
    with MindSpeedPatchesManager.owned_by(adapter.spec.name) as registered:
        try:
            feature.pre_register_patches(MindSpeedPatchesManager, values)
            feature.register_patches(MindSpeedPatchesManager, values)
        except MindSpeedError:
            raise
        except ImportError as error:
            text = (
                f"feature {adapter.spec.name}, which uses MindSpeed's interface, cannot register its patches, because an "
                f"import failed: {error}"
            )
            raise MindSpeedError([Problem("MS406", text, (adapter.spec.name,), fix=advice(_fix_of_import(error)))]) from error
        except Exception as error:  # foreign code may fail in any way
            text = (
                f"feature {adapter.spec.name}, which uses MindSpeed's interface, failed when it registered its patches: "
                f"{refusal_of(error)}"
            )
            fix = Fix.advise("correct the method register_patches of the feature's class")
            raise MindSpeedError([Problem("MS901", text, (adapter.spec.name,), fix=fix)]) from error
    return registered


def _fix_of_import(error: ImportError) -> str:
    """Name what is missing: a package, or a name that another version of an installed one has."""
    package = (error.name or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or (package and find_spec(package) is not None):
        return f"use the version of {package or 'the package'} that the feature was written for"
    is_base = package in ("", "torch", "megatron")
    return "make the plan where torch and megatron are installed" if is_base else f"install {package}"


def arguments_for(
    feature: MindSpeedFeature,
    args: FeatureArgs,
    world: World,
    common: Namespace | None = None,
    unknown_is_absent: bool = False,
) -> Namespace:
    """The namespace that a feature reads when it is on: Megatron's names, the common arguments, its settings, its switch."""
    settings = {name: list(value) if isinstance(value, tuple) else value for name, value in args}
    values = (vars(common) if common is not None else {}) | settings
    if not values.get(feature.feature_name):
        values[feature.feature_name] = True
    return namespace_of(world, values, unknown_is_absent)


def _accepts(feature: MindSpeedFeature, common: Callable[[], Namespace | None]) -> Condition:
    """Make one condition of the feature's three validations."""

    def refusal(args: Any, world: World) -> str:
        values = arguments_for(feature, args, world, common(), unknown_is_absent=True)
        try:
            for validate in (feature.pre_validate_args, feature.validate_args, feature.post_validate_args):
                validate(values)
        except AttributeError as error:
            if error.obj is not values:
                raise
            raise UnknownValue(str(error.name)) from error
        except Exception as error:  # MindSpeed's features refuse arguments with whatever error they like
            return refusal_of(error)
        return ""

    def said(args: Any, world: World) -> Mapping[str, str]:
        return {"refusal": refusal(args, world)}

    @condition("the checks of the feature refuse the arguments: {refusal}", values=said)
    def arguments_are_accepted(args: Any, world: World) -> bool:
        """Check that the feature accepts its arguments, where Megatron-LM's parser will not ask it."""
        from mindspeed.compat.megatron_lm import wires_arguments

        return (common() is not None and wires_arguments()) or not refusal(args, world)

    return arguments_are_accepted


def refusal_of(error: Exception) -> str:
    """Describe an error of a check in one line; the source line of an assertion without words."""
    if isinstance(error, MindSpeedError):
        return "; ".join(problem.message for problem in error.problems)
    last = traceback.extract_tb(error.__traceback__)[-1]
    return str(error) or f"{type(error).__name__} at {last.name}: {last.line}"


def _model(feature: MindSpeedFeature) -> type[OldArgs]:
    """The argument model of a feature; its own switch is no setting, unless it takes a value."""
    fields: dict[str, Any] = {}
    for action in _registered(feature):
        if is_switch(feature, action):
            continue
        default = action.default if action.default is not argparse.SUPPRESS else None
        fields[action.dest] = (_type(action), Field(default, description=action.help or action.dest))
    return create_model(f"{type(feature).__name__}Args", __base__=OldArgs, **fields)


def is_switch(feature: MindSpeedFeature, action: argparse.Action) -> bool:
    """Return whether an argument only switches its feature on."""
    return action.dest == feature.feature_name and _is_flag(action)


def _is_flag(action: argparse.Action) -> bool:
    return action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction)


def _type(action: argparse.Action) -> Any:
    if _is_flag(action):
        return bool
    kind: Any = action.type if action.type in (int, float, str) else (str if action.type is None else Any)
    if action.choices is not None:
        kind = Literal[tuple(action.choices)]
    if action.nargs not in (None, "?"):
        kind = tuple[kind, ...]
    return kind | None if kind is not Any else Any
