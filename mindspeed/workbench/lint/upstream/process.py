"""The child process of a checkout: it imports Megatron's rules as soon as it is made, and judges commands that are sent later.

Light, so that a check can make it before it imports what plans need.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from mindspeed.engine.inspection.megatron_copies import package_root, version_of

ARGUMENTS: Final = Path("megatron", "training", "arguments.py")
SECONDS: Final = 10.0
"""Processor time that the rules may take for one command."""
_PROGRAM: Final = "import sys; sys.path[:0] = {paths!r}; from mindspeed.workbench.lint.upstream.{module} import main; main()"


@dataclass(frozen=True, slots=True)
class Checkout:
    """Describe a Megatron-LM whose rules are run: its folder, version, and how it was found."""

    folder: Path
    version: str | None
    source: str


def find_checkout(program: str, environ: Mapping[str, str], given: str | None = None) -> Checkout | None:
    """Find the Megatron-LM of a command: the given one, that of its program, that of PYTHONPATH, else the importable one."""
    candidates = [(given, "given")] if given else [(str(parent), program) for parent in Path(program).parents]
    if not given:
        candidates += [(folder, "PYTHONPATH") for folder in environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
        if (training := package_root("training")) is not None:
            candidates.append((str(training.parent), "importable here"))
    for folder, source in candidates:
        if folder and Path(folder, ARGUMENTS).is_file():
            return Checkout(Path(folder).absolute(), version_of(Path(folder, "megatron")), source)
    return None


def rules_command(module: str, checkout: Path, facts: Mapping[str, Any]) -> list[str]:
    """Return the command of a process without site packages, whose ``main`` is that of another module of this package."""
    folders = [
        Path(__file__).parents[4],
        *(Path(spec.origin).parents[1] for name in ("packaging", "yaml") if (spec := find_spec(name)) and spec.origin),
    ]
    program = _PROGRAM.format(paths=list(dict.fromkeys(map(str, folders))), module=module)
    task = json.dumps({"checkout": str(checkout), "facts": dict(facts), "seconds": SECONDS})
    return [sys.executable, "-I", "-S", "-B", "-c", program, task]


class RulesProcess:
    """A process without site packages that runs the rules of a checkout for devices of a compute capability, as ``9.0``."""

    def __init__(self, checkout: Path, arch: str | None) -> None:
        command = rules_command("child", checkout, _facts_of(arch))
        self.checkout = checkout
        self._reason = ""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        try:
            self._process = subprocess.Popen(command, **pipes)  # type: ignore[call-overload]
        except OSError as error:
            self._reason = str(error)

    def answers(self, commands: Sequence[Mapping[str, Any]], timeout: float) -> tuple[list[dict[str, Any]], str]:
        """Send the commands and wait for the results. Return them, and why there are no more."""
        if self._reason:
            return [], self._reason
        try:
            output, errors = self._process.communicate(json.dumps(commands).encode(), timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            output, _ = self._process.communicate()
            return _whole_answers(output), f"no result within {timeout:.0f} s"
        said = errors.decode(errors="replace").strip().splitlines()[-1:] or ["nothing"]
        return _whole_answers(output), f"the process ended with status {self._process.returncode}: {said[0]}"


def _whole_answers(output: bytes) -> list[dict[str, Any]]:
    """Read the whole lines of a child, up to one that is no answer."""
    answers = []
    for line in output.splitlines(keepends=True):
        try:
            answer = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            break
        answers.append(answer)
    return answers


def _facts_of(arch: str | None) -> dict[str, Any]:
    """The facts of a device of this compute capability."""
    if arch is None:
        return {}
    major, _, minor = arch.partition(".")
    capability = [int(major), int(minor or 0)]
    properties = zip(("major", "minor"), capability, strict=True)
    return {
        "torch.cuda.get_device_capability()": capability,
        "torch.cuda.is_available()": True,
        **{f"torch.cuda.get_device_properties().{name}": number for name, number in properties},
    }
