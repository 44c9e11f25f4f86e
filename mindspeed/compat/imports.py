"""Import names of MindSpeed: those that work are made when they are imported, the others say what does their work here.

A last-resort finder, installed by ``import mindspeed``, is asked only about modules that nobody else finds.
"""

from __future__ import annotations

import pkgutil
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

from mindspeed.compat.moved import moved_spec
from mindspeed.compat.old_modules import OLD_MODULES, replacement
from mindspeed.compat.provided_names import BUILDERS, BUILDERS_OF_FEATURES, PROVIDED, VARIABLES
from mindspeed.problems import MindSpeedError, Problem, advice, near_names, suggestion

_FEATURES: Final = "mindspeed.features_manager"
_BUILDERS: Final = "mindspeed.op_builder"


class OldNameError(MindSpeedError, ModuleNotFoundError):
    """MS112. An ImportError too, so that consumers that try an import go on as before."""


class OldModule(ModuleType):
    """A module that MindSpeed has. Names that it does not have here are an AttributeError, as of every module."""

    def __getattr__(self, name: str) -> Any:
        value = _value(self.__name__, name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *_names(self.__name__)})


class _Loader:
    """Make an `OldModule`; its names are imported when they are asked for."""

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        return OldModule(spec.name)

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Set the variables of the module; there is nothing to run."""
        vars(module).update(VARIABLES.get(module.__name__, {}))


def find_spec(name: str) -> ModuleSpec | None:
    """Find a module of MindSpeed that works here; None for a name that was never MindSpeed's. Raises MS112 for the others.

    Every such module is a package, so that ``from module import name`` asks for ``module.name`` where it has none.
    """
    if moved := moved_spec(name):
        return moved
    if any(f"{known}.".startswith(f"{name}.") for known in _modules()):
        return ModuleSpec(name, _Loader(), is_package=True)  # type: ignore[arg-type]
    error = explain(name)
    if error is not None:
        raise error
    return None


def explain(missing: str) -> OldNameError | None:
    """Return the error for a module that was not found; None for a name that was never MindSpeed's."""
    module, name = _wanted(missing)
    if _prefix(f"{module}.{name}" if name else module) is None:
        return None
    return _error(module, name)


def _error(module: str, name: str) -> OldNameError:
    full = f"{module}.{name}" if name else module
    prefix = _prefix(full)
    if name in BUILDERS_OF_FEATURES:
        fix = BUILDERS_OF_FEATURES[name]
    elif prefix in (None, "mindspeed.ops"):
        fix = _near_operator(full)
    else:
        fix = replacement(prefix or "")
    what = f"{name} of {module}" if name else module
    text = f"{what} is a name of Ascend's original MindSpeed that this package does not provide"
    error = OldNameError([Problem("MS112", text, fix=advice(fix))])
    error.name = module
    return error


def _prefix(name: str) -> str | None:
    """The longest name above ``name`` that the table has, or ``mindspeed.ops``."""
    while name not in OLD_MODULES and name != "mindspeed.ops" and "." in name:
        name = name.rpartition(".")[0]
    return name if "." in name else None


def _wanted(name: str) -> tuple[str, str]:
    """The module that an import statement asks for, which may be below ``name``, and the name it takes from it, if any."""
    taken, frame = "", sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if not frame.f_code.co_filename.startswith("<frozen importlib"):
            continue
        if frame.f_code.co_name == "_handle_fromlist" and frame.f_locals.get("from_name") == name:
            name, _, taken = name.rpartition(".")
        inner = frame.f_locals.get("name")
        if isinstance(inner, str) and inner.startswith(f"{name}.") and not taken:
            name = inner
    return name, taken


def _modules() -> list[str]:
    from mindspeed.compat.feature_classes import CLASSES

    return [*PROVIDED, _BUILDERS, *(f"{_FEATURES}.{old.module}" for old in CLASSES.values())]


def _names(module: str) -> list[str]:
    """Names that an old module has here."""
    from mindspeed.compat.feature_classes import classes_in

    if module == _BUILDERS:
        return [*BUILDERS]
    classes = classes_in(module) if module.startswith(_FEATURES) else []
    return [*classes, *PROVIDED.get(module, ())]


def _value(module: str, name: str) -> Any:
    """The object that a name of an old module stands for."""
    if name not in _names(module):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    if module == _BUILDERS:
        from mindspeed.compat.provided_names import builder

        return builder(name)
    provided = PROVIDED.get(module, {})
    if name in provided:
        return pkgutil.resolve_name(provided[name])
    from mindspeed.compat.feature_classes import stand_in

    return stand_in(name)


def _near_operator(name: str) -> str:
    from mindspeed.ops import OPERATORS

    near = near_names(name.rpartition(".")[2], OPERATORS, cutoff=0.6)
    return suggestion([f"mindspeed.ops.{operator}" for operator in near], "mindspeed.ops has no such operator")
