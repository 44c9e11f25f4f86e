"""The Pythons to test: environments in subfolders, named as versions, of the folders that MINDSPEED_PYTHONS names."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import pytest
from packaging.specifiers import SpecifierSet

from tests.megatron.versions.conftest import Megatron, unpacked

ROOT: Final = Path(__file__).resolve().parents[2]
RESULTS: Final = ROOT / "build" / "python-results"
"""What was found under each Python, from which `tools.docs.results` makes the results of the page on support."""
VARIABLE: Final = "MINDSPEED_PYTHONS"
VERSIONS: Final = ("3.10", "3.12", "3.13")
"""The supported Pythons beside 3.11, which every other test runs under."""
_REQUIRED: Final = re.compile(r"^(?:requires-python = \"|Requires-Python: )([^\"\n]+)\"?$", re.MULTILINE)


@dataclass(frozen=True)
class Interpreter:
    """A Python with torch, megatron-core and the packages of the tests."""

    version: str
    program: Path

    def run(self, *command: str, megatron: Megatron | None = None) -> str:
        """Return the output of this Python, beside its own Megatron or another; fail with its errors."""
        path = os.pathsep.join([str(ROOT), *([str(megatron.folder)] if megatron else [])])
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("MINDSPEED_")}
        environment = {**inherited, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
        program = [str(self.program), *command]
        done = subprocess.run(program, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
        assert done.returncode == 0, f"Python {self.version}: {done.stdout[-6000:]}{done.stderr[-6000:]}"
        return done.stdout

    @cached_property
    def versions(self) -> dict[str, str]:
        """The exact versions of this Python and of its torch."""
        told = "import json, platform; from importlib.metadata import version as of"
        printed = self.run("-c", f"{told}; print(json.dumps({{'python': platform.python_version(), 'torch': of('torch')}}))")
        found: dict[str, str] = json.loads(printed)
        assert found["python"].startswith(f"{self.version}."), f"{self.program} is Python {found['python']}"
        return found


def interpreters() -> dict[str, Interpreter]:
    """Return the Pythons at hand by version; the variable may name several folders, as PATH does."""
    folders = [Path(folder).absolute() for folder in os.environ.get(VARIABLE, "").split(os.pathsep) if folder]
    programs = [(version, folder / version / "bin" / "python") for version in VERSIONS for folder in folders]
    return {version: Interpreter(version, program) for version, program in programs if program.exists()}


def python_needed(megatron: Megatron) -> str:
    """Return the Pythons that a Megatron asks for in its own project file, a checkout's or an unpacked package's."""
    files = [megatron.folder / "pyproject.toml", *megatron.folder.glob("megatron_core-*.dist-info/METADATA")]
    texts = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
    needed = [found[1] for text in texts if (found := _REQUIRED.search(text))]
    return needed[0] if needed else ""


def refusal(megatron: Megatron, python: str) -> str:
    """Say that a Megatron does not take a Python; empty when it does."""
    needed = python_needed(megatron)
    return "" if SpecifierSet(needed).contains(python) else f"asks for Python {needed}"


@pytest.fixture(scope="session", params=VERSIONS)
def python(request: pytest.FixtureRequest) -> Interpreter:
    """Give every supported Python in turn; skip, by name, the one that is not at hand."""
    found = interpreters().get(request.param)
    if found is None:
        pytest.skip(f"no Python {request.param}: {VARIABLE} names no folder with {request.param}/bin/python")
    return found


@pytest.fixture(scope="session")
def answers(python: Interpreter) -> Iterator[dict[str, Any]]:
    """Collect what was found under a Python; its file is written at the end, and what is not run again stays in it."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    file = RESULTS / f"{python.version}.json"
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    found: dict[str, Any] = {"checks": {}, "claims": {}, **before, **python.versions}
    yield found
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


@pytest.fixture(params=[None, *unpacked()], ids=lambda one: one.version if one else "installed")
def beside(request: pytest.FixtureRequest) -> Megatron | None:
    """Give the Megatron that is installed, then each that is unpacked."""
    return request.param
