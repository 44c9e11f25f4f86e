"""Record a Megatron release for maintainers: ``mindspeed patches record --megatron CHECKOUT``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindspeed.engine.inspection.config_arguments import known_arguments
from mindspeed.engine.inspection.releases import FOLDER, Section, read_release, release_file, write_release
from mindspeed.engine.planning.drift import Tree, read_targets
from mindspeed.engine.planning.targets import PatchTarget
from mindspeed.engine.resolution.environment import SUPPORTED_MEGATRON, UNTESTED_MEGATRON, version_in
from mindspeed.problems.fixes import Advice
from mindspeed.problems.problem import MindSpeedError, Problem


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
                    fix=Advice("give a complete checkout, in which megatron/core/package_info.py defines the version"),
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
    command = [sys.executable, "-W", "ignore", "-m", "mindspeed.megatron.cli_recording", str(checkout)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        text = f"the arguments of {checkout} cannot be read: {last}"
        raise MindSpeedError([Problem("MS502", text, fix=Advice("install the packages that this Megatron-LM imports"))])
    arguments: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return arguments
