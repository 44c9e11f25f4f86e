"""MindSpeed's builders of operators: ``XOpBuilder().load()`` gives an object with the functions of `mindspeed.ops`."""

from __future__ import annotations

import functools
from importlib import import_module
from types import SimpleNamespace
from typing import ClassVar

from mindspeed.compat.provided_names import BUILDERS


class OpBuilder:
    """Base of the builders. Nothing is compiled: ``mindspeed ops build`` does that for every operator."""

    functions: ClassVar[tuple[str, ...]] = ()

    def load(self, verbose: bool = True) -> SimpleNamespace:
        """Return the functions of the operator."""
        pairs = [function.split(":") for function in self.functions]
        return SimpleNamespace(**{name: getattr(import_module(f"mindspeed.ops.{module}"), name) for module, name in pairs})


@functools.cache
def builder(name: str) -> type[OpBuilder]:
    """Return the class with a name of MindSpeed's. Raises KeyError for other names."""
    return type(name, (OpBuilder,), {"functions": tuple(BUILDERS[name]), "__doc__": f"Load {', '.join(BUILDERS[name])}."})
