"""Megatron-LM's own unit tests, in the checkout that MEGATRON_LM_PATH names.

They run at level 0, at the default level, and on layers in the roles of Transformer Engine's.

The expected outcome of every test is recorded (own_unit_tests/<version>.json). Files without a test that passes are not run.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.megatron_lm.checkout import ROOT, build_helpers, path
from tests.megatron_lm.own_unit_tests.outcomes import LOCAL, PASSES, ROLES, Expected, class_of, compact, read_results

VERSION = "0.16.1"
RUNNER = Path(__file__).parent / "own_unit_tests" / "runner.py"
FOLDERS = [(nproc, folder) for nproc in (1, 2) for folder in Expected(VERSION, nproc).folders()]
IN_ROLES = Expected(VERSION, "roles")


def run(root: Path, files: list[str], nproc: int, plan: Mapping[str, object], results: Path) -> Mapping[str, tuple[str, str]]:
    """``{test: (state, reason)}`` of these files."""
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": search, "OMP_NUM_THREADS": "1", "MINDSPEED_PLATFORM": "cpu"}
    command = [sys.executable, "-W", "ignore", str(RUNNER), str(root), str(results), str(nproc), json.dumps(plan), *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return read_results(results)


@pytest.fixture(scope="module")
def root() -> Path:
    root = path()
    if find_spec("pytest_mock") is None:
        pytest.skip("Megatron-LM's unit tests need pytest-mock")
    if f"MINOR = {VERSION.split('.')[1]}\n" not in (root / "megatron" / "core" / "package_info.py").read_text():
        pytest.skip(f"the recorded outcomes are those of Megatron-LM {VERSION}")
    build_helpers(root)
    return root


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("nproc", "folder"), FOLDERS, ids=lambda value: str(value).replace("tests/unit_tests", ""))
def test_what_megatron_passes_on_the_platform_it_passes_with_the_features_of_level_1(root, tmp_path, nproc, folder):
    expected = Expected(VERSION, nproc)
    files = expected.folders()[folder]
    platform = run(root, files, nproc, {"level": 0}, tmp_path / "platform.jsonl")
    passing = {test for test, (state, _) in platform.items() if state == "passed"}
    lost = {test: outcome for test, outcome in platform.items() if test not in passing and expected.of(test) == PASSES}
    assert lost == {}
    default = run(root, files, nproc, {"level": 2}, tmp_path / "default.jsonl")
    assert {test: default.get(test) for test in passing if default.get(test, ("", ""))[0] != "passed"} == {}


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("folder", IN_ROLES.folders(), ids=lambda value: value.replace("tests/unit_tests", ""))
def test_what_passes_in_the_roles_of_transformer_engine_still_does(root, tmp_path, folder):
    found = run(root, IN_ROLES.folders()[folder], 1, ROLES, tmp_path / "roles.jsonl")
    lost = {test: outcome for test, outcome in found.items() if IN_ROLES.of(test) == PASSES and outcome[0] != "passed"}
    assert lost == {}


def test_no_test_that_passes_on_the_platform_fails_in_the_roles_unless_it_asks_for_local_layers():
    in_roles = dict(IN_ROLES.tests())
    files = {test.partition("::")[0] for test in in_roles}
    passing = [test for test, kind in Expected(VERSION, 1).tests() if kind == PASSES and test.partition("::")[0] in files]
    assert passing
    for test in passing:
        cases = {kind for name, kind in in_roles.items() if name.startswith(f"{test}[")}
        assert {IN_ROLES.of(test), *cases} - {None, LOCAL} <= {PASSES}, test


def test_cases_of_one_class_are_recorded_by_their_test():
    recorded = compact({"a.py::T::f[1]": "passes", "a.py::T::f[2]": "passes", "a.py::g[1]": "passes", "a.py::g[2]": "other"})
    assert recorded == {"a.py": {"other": ["g[2]"], "passes": ["T::f", "g[1]"]}}


@pytest.mark.parametrize(
    ("state", "reason", "kind"),
    [
        ("passed", "", PASSES),
        ("failed", "RuntimeError: world_size (1) is not divisible by 8", "needs more ranks"),
        ("failed", "NameError: name 'TESpecProvider' is not defined", "needs Transformer Engine or Triton"),
        ("failed", "AssertionError: assert 'cpu' == 'cuda'", "needs a GPU feature"),
        ("failed", "E   ModuleNotFoundError: No module named 'nltk'", "needs another package"),
        ("failed", "MindSpeedError: MS605 the script sets transformer_impl='local', but the plan sets", LOCAL),
        ("skipped", "Skipped: Deep EP and Hybrid EP are not available", "skipped by Megatron"),
    ],
)
def test_an_outcome_has_a_class_by_its_reason(state, reason, kind):
    assert class_of("a.py::test", state, reason) == kind
