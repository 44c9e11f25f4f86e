"""The page of operators, read from their source: torch is not imported."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from mindspeed import ops
from mindspeed.job.world import PLATFORMS
from mindspeed.ops.availability import REFERENCE, label, reason, variant
from mindspeed.plugins.discovery import Catalog
from mindspeed.workbench.pages.markdown import code, table

_GRADIENT: Final = 4
"""Position of the gradient among the arguments of ``define``."""


def operators(_catalog: Catalog) -> Iterator[list[str]]:
    """Yield every public operator: its variants, what it computes, how it is called, its schemas."""
    words = (
        "`from mindspeed.ops import rms_norm` gives the function, `torch.ops.mindspeed.rms_norm` the operator on PyTorch's "
        "dispatcher. Each has a plain-torch reference, which runs everywhere, and a shape kernel; a variant for a platform "
        f"takes its place there. {len(forward_only())} of the {len(ops.OPERATORS)} are forward only: they refuse tensors that "
        "need a gradient."
    )
    yield [words]
    yield list(_variants())
    modules = {name: name for name in ops.OPERATORS} | dict(ops.ALIASES)
    for name in sorted(modules):
        yield list(_section(name, modules[name]))


def forward_only() -> list[str]:
    """The operators that neither have a gradient nor add to one, by the calls of ``define`` in their source."""
    return [name for name in ops.OPERATORS if not any(_takes_part_in_backward(call) for call in _definitions(name))]


def _definitions(name: str) -> list[ast.Call]:
    tree = ast.parse((Path(ops.__path__[0]) / f"{name}.py").read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "define"]


def _takes_part_in_backward(call: ast.Call) -> bool:
    given = [*call.args[_GRADIENT:], *(word.value for word in call.keywords if word.arg == "gradient")]
    adds = "!) grad" in ast.unparse(call.args[0])
    return adds or any(not ast.unparse(gradient).startswith("no_gradient(") for gradient in given)


def _section(name: str, module: str) -> Iterator[str]:
    tree = ast.parse((Path(ops.__path__[0]) / f"{module}.py").read_text(encoding="utf-8"))
    yield from (f"## {name}", "", _prose(tree) if module == name else f"Of the family of [{module}](#{module}).")
    for function in tree.body:
        if isinstance(function, ast.FunctionDef) and function.name == name:
            returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
            yield from ("", "```python", f"{name}({ast.unparse(function.args)}){returns}", "```")
            if text := _prose(function):
                yield from ("", text)
    own = [schema for schema in _schemas(tree) if schema.partition("(")[0].removesuffix("_backward") == name]
    if own:
        yield from ("", *(f"- {code('mindspeed::' + schema)}" for schema in own))
    if module == name and name in forward_only():
        yield from ("", "Forward only: no gradient.")
    found = [f"{platform} ({kind})" for platform in PLATFORMS if (kind := variant(module, platform)) != REFERENCE]
    yield from ("", f"More than the reference on: {', '.join(found) or 'no platform'}.")


def _variants() -> Iterator[str]:
    """The table operator x device, and below it why there is nothing but a reference where that is so."""
    yield from ("## Variants", "")
    kinds = {op: [variant(op, platform) for platform in PLATFORMS] for op in ops.OPERATORS}
    rows = [(f"[{op}](#{op})", *(label(op, kind) for kind in row)) for op, row in kinds.items()]
    yield from table(("operator", *PLATFORMS), rows)
    portable = (
        "A C++ kernel with an instruction set in brackets needs it, and elsewhere its calls run the reference. C++ kernels "
        "without brackets are portable: they compile for aarch64 too."
    )
    yield from ("", portable)
    yield from ("", "`mindspeed ops list` says which of them run on a machine, and why not the others. Why a reference:", "")
    why: dict[str, dict[str, list[str]]] = {}
    for op, row in kinds.items():
        for platform, kind in zip(PLATFORMS, row, strict=True):
            if kind == REFERENCE:
                why.setdefault(reason(op, platform), {}).setdefault(op, []).append(platform)
    for text, where in why.items():
        yield f"- {'; '.join(f'{op} on {_and(platforms)}' for op, platforms in where.items())}: {text}."


def _and(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _schemas(tree: ast.Module) -> list[str]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "define" and node.args]
    return [str(call.args[0].value) for call in calls if isinstance(call.args[0], ast.Constant)]


def _prose(node: ast.Module | ast.FunctionDef) -> str:
    return inspect.cleandoc(ast.get_docstring(node) or "").replace("``", "`")
