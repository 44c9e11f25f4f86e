"""mindspeed under the other supported Pythons: modules, command line, resolver, patching, and claims beside each Megatron."""

import json
from typing import Any, Final

import pytest

from mindspeed.engine.inspection.megatron_copies import version_of
from tests.megatron.versions.conftest import Megatron
from tests.pythons.conftest import Interpreter, refusal

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

TESTS: Final = {
    "command line": ("tests/cli/test_main.py", "tests/cli/test_list.py", "tests/cli/test_plan.py", "tests/cli/test_check.py"),
    "resolver": ("tests/engine/resolution",),
    "patching": (
        "tests/engine/patching/test_aliases.py",
        "tests/engine/patching/test_apply.py",
        "tests/engine/patching/test_imports.py",
        "tests/engine/runtime/test_call_count.py",
        "tests/engine/runtime/test_code_swap.py",
    ),
}
"""Tests of the default run that depend on the Python: on its import system, its code objects, its option parser."""
CLAIMS: Final = ("sequence-parallel", "swiglu")
"""A feature that works by hook points on two ranks, and an operator with a gradient of its own."""


def test_every_module_can_be_imported(python: Interpreter, answers: dict[str, Any]) -> None:
    answers["checks"]["import"] = "fails"
    found = json.loads(python.run("-m", "tests.pythons.imports").splitlines()[-1])
    assert found["modules"] > 500
    assert found["failed"] == []
    answers["checks"]["import"] = "passed"


@pytest.mark.parametrize("part", TESTS)
def test_a_part_passes_its_own_tests(python: Interpreter, answers: dict[str, Any], part: str) -> None:
    answers["checks"][part] = "fails"
    options = ("-q", "-m", "not long", "-p", "no:cacheprovider")
    printed = python.run("-m", "pytest", *options, *TESTS[part])
    assert " passed" in printed.splitlines()[-1]
    answers["checks"][part] = "passed"


def test_claims_hold_beside_a_megatron(python: Interpreter, answers: dict[str, Any], beside: Megatron | None) -> None:
    if beside is not None and (reason := refusal(beside, python.versions["python"])):
        answers["claims"][version_of(beside.folder / "megatron") or beside.version] = reason
        pytest.skip(f"megatron-core {beside.version} {reason}")
    answers["claims"]["installed" if beside is None else beside.version] = "fails"
    printed = python.run("-m", "tests.megatron.versions.verify_cases", *CLAIMS, megatron=beside)
    found = json.loads(printed.splitlines()[-1])
    assert found["python"] == python.versions["python"]
    assert {name: (case["holds"], case["problems"]) for name, case in found["cases"].items()} == dict.fromkeys(
        CLAIMS, (True, [])
    )
    answers["claims"].pop("installed" if beside is None else beside.version)
    answers["claims"][found["megatron"]] = "passed"
