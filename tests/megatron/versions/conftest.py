"""The Megatron versions to test: subfolders of the folder that the variable MINDSPEED_MEGATRONS names."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from tests import older_python

ROOT: Final = Path(__file__).resolve().parents[3]
RESULTS: Final = ROOT / "build" / "versions"
"""What was found on each version, from which `tools.docs.results` makes the results of the page on support."""
VARIABLE: Final = "MINDSPEED_MEGATRONS"
MISSING: Final = f"{VARIABLE} names no folder of unpacked Megatron versions; `make test-versions` makes one and sets it"


@dataclass(frozen=True, slots=True)
class Megatron:
    """An unpacked megatron-core: what ``pip install --target FOLDER`` leaves."""

    version: str
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a process that imports this Megatron, and mindspeed from this checkout."""
        path = os.pathsep.join([*older_python.FOLDERS, str(ROOT), str(self.folder)])
        return {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}

    def require_data_helpers(self) -> None:
        """Skip a test that reads data where a checkout has no compiled helpers for it, which a wheel has."""
        source = self.folder / "megatron" / "core" / "datasets"
        if not list(source.glob("helpers_cpp*")):
            pytest.skip(f"{source} has no compiled data helpers: make -C {source}")

    def run(self, *command: str) -> str:
        """The output of a Python process beside this Megatron; fails with its errors."""
        arguments = [sys.executable, *command]
        done = subprocess.run(arguments, capture_output=True, text=True, check=False, env=self.environment, cwd=ROOT)
        assert done.returncode == 0, f"megatron-core {self.version}: {done.stderr[-6000:] or done.stdout[-6000:]}"
        return done.stdout


def unpacked() -> list[Megatron]:
    """The versions at hand, lowest first; the variable may name several folders, as PATH does."""
    folders = [Path(folder) for folder in os.environ.get(VARIABLE, "").split(os.pathsep) if folder]
    found = sorted((one for folder in folders for one in folder.iterdir()), key=lambda one: one.name)
    return [Megatron(one.name, one.resolve()) for one in found if (one / "megatron" / "core" / "__init__.py").is_file()]


@pytest.fixture(scope="session", params=unpacked() or [None], ids=lambda one: one.version if one is not None else "none")
def megatron(request: pytest.FixtureRequest) -> Megatron:
    """Every version in turn; skips, with the reason, when there is none."""
    if request.param is None:
        pytest.skip(MISSING)
    return request.param


@pytest.fixture(scope="session")
def answers(megatron: Megatron) -> Mapping[str, Any]:
    """What `verify_cases` prints beside this Megatron: all cases in one pool of processes."""
    printed = megatron.run(str(Path(__file__).with_name("verify_cases.py"))).splitlines()[-1]
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{megatron.version}.json").write_text(printed, encoding="utf-8")
    return json.loads(printed)
