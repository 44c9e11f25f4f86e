"""Record a Megatron release for maintainers: ``mindspeed patches record --megatron CHECKOUT``."""

from __future__ import annotations

import argparse
import enum
import json
import os
import subprocess
import sys
import typing
from collections.abc import Iterator, Sequence
from importlib import util
from pathlib import Path
from typing import Any, Final
from unittest.mock import MagicMock

import typing_extensions

from mindspeed.engine.inspection.config_arguments import known_arguments
from mindspeed.engine.inspection.releases import FOLDER, Section, read_release, release_file, write_release
from mindspeed.engine.planning.drift import Tree, read_targets
from mindspeed.engine.planning.targets import PatchTarget
from mindspeed.engine.resolution.environment import SUPPORTED_MEGATRON, UNTESTED_MEGATRON, version_in
from mindspeed.megatron.fixes.kernels import UNGUARDED
from mindspeed.problems import Fix, MindSpeedError, Problem


def record_release(tree: Tree, targets: Sequence[PatchTarget], folder: Path = FOLDER) -> Path:
    """Write the release file of a source tree and return its path.

    What the tree cannot tell stays as it was recorded: of the megatron-core distribution alone, the targets and command-line
    arguments of Megatron-LM. Raises MindSpeedError MS502 for a tree that does not say its version.
    """
    if tree.version is None or tree.root is None:
        text = f"the version of the Megatron in {tree.root} cannot be determined"
        raise MindSpeedError(
            [
                Problem(
                    "MS502",
                    text,
                    fix=Fix.advise("give a complete checkout, in which megatron/core/package_info.py defines the version"),
                )
            ]
        )
    recorded = release_file(tree.version)
    sections: dict[Section, Any] = {"targets": {}}
    if recorded.is_file():
        sections |= {name: content for name, content in read_release(recorded).items() if name != "megatron"}  # type: ignore[misc]
    rows = {target: contract.to_json() for target, contract in read_targets(tree, targets).items()}
    wanted = {target.target for target in targets}
    kept = {target: row for target, row in sections["targets"].items() if target in wanted}
    sections["targets"] = dict(sorted((kept | rows).items()))
    if any(version_in(tree.version, versions) for versions in (SUPPORTED_MEGATRON, UNTESTED_MEGATRON)):
        sections["configuration"] = {name: sorted(names) for name, names in known_arguments().items()}
        if (tree.root / "megatron" / "training").is_dir():
            sections["command_line"] = _command_line(tree.root)
    file = release_file(tree.version, folder)
    write_release(file, tree.version, sections)
    return file


def _command_line(checkout: Path) -> list[dict[str, Any]]:
    """The arguments of a checkout's parser, built in a process of its own, which imports the checkout."""
    command = [sys.executable, "-W", "ignore", "-m", "mindspeed.megatron.release_recording", str(checkout)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        text = f"the arguments of {checkout} cannot be read: {last}"
        raise MindSpeedError([Problem("MS502", text, fix=Fix.advise("install the packages that this Megatron-LM imports"))])
    arguments: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return arguments


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
