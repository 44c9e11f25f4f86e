"""Import names of MindSpeed that work here: the object behind each, builders of operators among them."""

from __future__ import annotations

import functools
from importlib import import_module
from types import SimpleNamespace
from typing import Any, ClassVar, Final

from mindspeed.files.tables import table_beside

_TABLES: Final[dict[str, Any]] = table_beside(__file__)

PROVIDED: Final[dict[str, dict[str, str]]] = _TABLES["provided"]
"""Modules that exist in MindSpeed alone, and their names; ``"module"`` or ``"module:name"`` is what a name stands for."""

VARIABLES: Final[dict[str, dict[str, None]]] = {"mindspeed.args_utils": {"_MINDSPEED_ARGS": None}}
"""Variables of old modules, with their first values; consumers write to them."""

BUILDERS: Final[dict[str, list[str]]] = _TABLES["builders"]
"""MindSpeed's builders that have operators here: the functions, below ``mindspeed.ops``, that their ``load`` gives."""

BUILDERS_OF_FEATURES: Final[dict[str, str]] = _TABLES["builders_of_features"]
"""MindSpeed's builders whose library has no functions here, and the reason."""


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
