"""Plain megatron-core under ``mindspeed run``: equal losses and weights, and fewer bytes by the C library's count."""

import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.warm_processes import warm_python

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "memory" / "plain_job.py"
SETTINGS = {
    "norm-recompute": (),
    "activation-recompute": (),
    "adaptive-recompute": ("adaptive-recompute.budget_mb=100",),
    "swap-attention": (),
    "reuse-fp32-param": ("reuse-fp32-param.parts=4",),
    "swap-optimizer": ("swap-optimizer.parts=4",),
}
SWAPPED = ("swap-attention", "swap-optimizer")
"""What leaves for the host stays in the C library's count, with the few objects that stand for it."""


@cache
def trained(name: str = "") -> tuple[dict[str, Any], dict[str, Any]]:
    """What the script prints of a training without, and of one with evaluation between the steps."""
    options = ["--features", name] if name else []
    options += [word for value in SETTINGS.get(name, ()) for word in ("--set", value)]
    command = [*warm_python(), "-m", "mindspeed", "run", "--platform", "cpu", *options, "--", str(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    without, evaluated = json.loads(done.stdout)
    return without, evaluated


@pytest.mark.parametrize("name", SETTINGS)
def test_a_plain_script_trains_as_without_the_feature_in_fewer_bytes(name: str) -> None:
    stock, found = trained()[0], trained(name)
    assert [run["losses"] for run in found] == [stock["losses"]] * 2
    assert [run["weights"] for run in found] == [stock["weights"]] * 2
    bytes, before = (run["kept"] + run["rest"] for run in (found[0], stock))
    assert bytes < (1.005 if name in SWAPPED else 0.99) * before


def test_evaluation_between_steps_changes_nothing() -> None:
    without, evaluated = trained()
    assert (evaluated["losses"], evaluated["weights"]) == (without["losses"], without["weights"])
    assert without["losses"][0] > without["losses"][-1]
