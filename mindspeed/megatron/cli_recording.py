"""Print the arguments of a Megatron-LM checkout as JSON: ``python -m mindspeed.megatron.cli_recording CHECKOUT``.

Started by `mindspeed.megatron.release_recording`; it imports the checkout, torch included. What is printed depends on the
checkout alone: packages that building a parser does not call are stood in for when they are missing, and the environment
variables that defaults read are cleared.
"""

from __future__ import annotations

import argparse
import enum
import json
import os
import sys
import typing
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from typing import Any, Final
from unittest.mock import MagicMock

import typing_extensions

from mindspeed.megatron.fixes.kernels import UNGUARDED

_UNUSED_BY_PARSERS: Final = (
    # (package, what stands for it when it is missing)
    ("regex", "regex"),
    *(("triton", module) for module in UNGUARDED),  # torch asks for triton itself
)
_ACTIONS: Final = {kind: name for name, kind in argparse.ArgumentParser()._registries["action"].items()} | {
    argparse.BooleanOptionalAction: "boolean_optional"
}
"""Names of argparse's actions."""


def command_line_of(checkout: Path) -> list[dict[str, Any]]:
    """The rows of the parser's arguments, in its order. Raises ImportError outside a checkout."""
    sys.path.insert(0, str(checkout.resolve()))
    for name in [name for name in os.environ if name.startswith(("NVTE_", "MSC_", "CUDA_"))]:
        del os.environ[name]
    sys.modules.update({module: MagicMock() for package, module in _UNUSED_BY_PARSERS if util.find_spec(package) is None})
    if not hasattr(typing, "override"):  # Python 3.12 has it
        typing.override = typing_extensions.override  # type: ignore[attr-defined, unused-ignore]
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return [dict(_row(action)) for action in parser._actions if not isinstance(action, argparse._HelpAction)]


def _row(action: argparse.Action) -> Iterator[tuple[str, Any]]:
    """The fields of `mindspeed.engine.inspection.cli_arguments.Argument` that differ from its defaults."""
    yield "options", action.option_strings
    yield "dest", action.dest
    kind = _ACTIONS.get(type(action), type(action).__name__)
    if kind != "store":
        yield "action", kind
    if action.default is not None:
        yield "default", _plain(action.default)
    if action.type is not None:
        yield "type", getattr(action.type, "__name__", "callable")
    if action.nargs is not None and kind == "store":
        yield "nargs", action.nargs
    if action.choices is not None:
        yield "choices", [_plain(choice) for choice in action.choices]
    if kind in ("store_const", "store") and action.const is not None:
        yield "const", _plain(action.const)
    if action.required:
        yield "required", True


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)


if __name__ == "__main__":
    print(json.dumps(command_line_of(Path(sys.argv[1]))))
