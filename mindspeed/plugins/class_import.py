"""Importing one class of a module whose other classes may be malformed."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Mapping
from importlib.abc import InspectLoader
from importlib.util import find_spec, module_from_spec
from traceback import walk_tb
from types import ModuleType
from typing import Any, Final

_MALFORMED: Final = "__malformed_classes__"
"""Attribute of a module that was executed without some of its classes: their errors by name."""


def import_class(module_name: str, name: str) -> Any:
    """Import a module and return its class of this name, also where the statement of another class raises an error.

    Raises the error of the class itself, and those of statements that define no class.
    """
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        module = _without_malformed_classes(module_name, error)
    errors: Mapping[str, Exception] = vars(module).get(_MALFORMED, {})
    if name in errors:
        raise errors[name]
    return getattr(module, name)


def _without_malformed_classes(name: str, error: Exception) -> ModuleType:
    """Execute a module whose import raised an error anew, without the classes at fault."""
    spec = find_spec(name)
    source = spec.loader.get_source(name) if spec is not None and isinstance(spec.loader, InspectLoader) else None
    if spec is None or source is None:
        raise error
    tree, errors = ast.parse(source), dict[str, Exception]()
    while (malformed := _class_at_fault(error, name, tree)) is not None:
        needed = error.name if isinstance(error, NameError) else None
        errors[malformed.name] = errors.get(needed or "", error)
        tree.body.remove(malformed)
        module = sys.modules[name] = module_from_spec(spec)
        setattr(module, _MALFORMED, errors)
        try:
            exec(compile(tree, spec.origin or name, "exec"), vars(module))
        except Exception as further:
            del sys.modules[name]
            error = further
        else:
            return module
    raise error


def _class_at_fault(error: Exception, name: str, tree: ast.Module) -> ast.ClassDef | None:
    """Return the class statement at the top level of a module that raised an error."""
    frames = walk_tb(error.__traceback__)
    line = next((line for frame, line in frames if frame.f_globals.get("__name__") == name), 0)
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef):
            first = min([statement.lineno, *(decorator.lineno for decorator in statement.decorator_list)])
            if first <= line <= (statement.end_lineno or first):
                return statement
    return None
