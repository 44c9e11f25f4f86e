"""MindSpeed's own tests on the cpu platform: each file ends as peer_outcomes.json says, with reasons where it does not pass.

``MINDSPEED_PATH`` names a checkout of MindSpeed and ``MEGATRON_LM_PATH`` one of Megatron-LM. The tests run in a copy, without
MindSpeed's package beside them; `tests.compat.peer` has the stand-ins for torch_npu and torchair.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECKOUT = os.environ.get("MINDSPEED_PATH", "")
MEGATRON = os.environ.get("MEGATRON_LM_PATH", "")
OUTCOMES: Mapping[str, Mapping[str, str]] = json.loads(Path(__file__).with_name("peer_outcomes.json").read_text())
"""By file below ``tests_extend/unit_tests``: "passes", or why not; ``tests`` are those of a file that end otherwise."""

SMALLER: Mapping[str, Mapping[str, str]] = {
    "ops/atb/test_matmul_add.py": {"range(10)": "range(2)", "4096": "64", "8192": "128"},
    "ops/cann/test_npu_mm_all_reduce_add_rms_norm.py": {"4, 1024, 1024, 8192": "4, 32, 64, 128"},
    "ops/cann/test_npu_mm_all_reduce_add_rms_norm_.py": {"4, 1024, 1024, 8192": "4, 32, 64, 128"},
}
"""Sizes of a file for which a CPU takes minutes, and what they become in the copy."""

RUN = {file: row for file, row in OUTCOMES.items() if row["file"] == "passes"}


def test_every_recorded_outcome_is_one_of_five_kinds():
    reasons = [text for row in OUTCOMES.values() for text in row.values()]
    kinds = ("passes", "skipped by MindSpeed", "internals of MindSpeed: ", "differs: ", "untried: ")
    assert [text for text in reasons if not text.startswith(kinds)] == []


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    """A copy of MindSpeed's tests, some with smaller sizes."""
    folder = tmp_path_factory.mktemp("peer")
    shutil.copytree(Path(CHECKOUT, "tests_extend"), folder / "tests_extend")
    for name, sizes in SMALLER.items():
        file = folder / "tests_extend/unit_tests" / name
        text = file.read_text(encoding="utf-8")
        for large, small in sizes.items():
            assert large in text, name
            text = text.replace(large, small)
        file.write_text(text, encoding="utf-8")
    return folder


def outcomes_of(suite: Path, file: str) -> dict[str, str]:
    """How each test of a file ended, by the name of its function: FAILED, or PASSED, or SKIPPED."""
    path = [str(ROOT), str(ROOT / "tests/compat/peer"), str(suite), MEGATRON]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path), "MINDSPEED_PLATFORM": "cpu", "MINDSPEED_OPS": "reference"}
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-p", "torch_npu", "-p", "no:cacheprovider"]
    options = ["--rootdir", str(suite), "--run-all", "-q", "-rA", "--tb=line", f"tests_extend/unit_tests/{file}"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, env=env, cwd=suite, check=False)
    rows = re.findall(r"^(PASSED|FAILED|ERROR) \S+?::(?:\w+::)?(\w+)", done.stdout, re.MULTILINE)
    ended: dict[str, str] = {}
    for outcome, name in rows:
        ended[name] = "FAILED" if "FAILED" in (outcome, ended.get(name)) else outcome
    assert ended or "skipped" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]
    return ended


@pytest.mark.long
@pytest.mark.skipif(not (CHECKOUT and MEGATRON), reason="MINDSPEED_PATH or MEGATRON_LM_PATH names no checkout")
@pytest.mark.parametrize("file", RUN)
def test_a_file_of_mindspeeds_tests_ends_as_recorded(suite, file):
    ended = outcomes_of(suite, file)
    others = {name for name, text in RUN[file].items() if text.startswith("differs: ")}
    assert {name for name, outcome in ended.items() if outcome != "PASSED"} == others


@pytest.mark.long
@pytest.mark.skipif(not CHECKOUT, reason="MINDSPEED_PATH names no checkout of MindSpeed")
def test_every_file_of_the_families_is_recorded():
    tests = Path(CHECKOUT, "tests_extend", "unit_tests")
    families = ("ops/cann", "ops/atb", "mindspeed/core/context_parallel", "features/moe")
    files = {str(file.relative_to(tests)) for family in families for file in (tests / family).glob("test_*.py")}
    assert files | {"mindspeed/test_register_patches.py"} == OUTCOMES.keys()
