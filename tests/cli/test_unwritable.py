"""Folders that cannot be written: one problem with the path, never a traceback."""

import json

import pytest

from mindspeed.ops import availability
from tests.cli.conftest import LAPTOP


@pytest.fixture
def blocked(tmp_path):
    """A folder that cannot be made, whoever tries: a file is in its way."""
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "folder"


def test_ops_build_names_the_folder_and_the_variable(mindspeed, monkeypatch):
    monkeypatch.setenv("MINDSPEED_CACHE", "/proc/no/such")
    done = mindspeed("ops", "build")
    assert done.exit_code == 3
    first, where, fix = done.stderr.splitlines()
    assert first == "MS514 the folder of built operators is not writable: No such file or directory"
    assert where.startswith("  where: /proc/no/such/ops/")
    assert fix.startswith("  fix: MINDSPEED_CACHE=FOLDER mindspeed ops build")


def test_pretrain_names_the_folder_of_prepared_data_and_the_variable(mindspeed, blocked, monkeypatch, tmp_path):
    monkeypatch.setenv("MINDSPEED_CACHE", str(blocked))
    done = mindspeed("pretrain", "--run", tmp_path / "run")
    assert done.exit_code == 1
    assert done.stderr == (
        "MS603 the folder for prepared data is not writable: Not a directory\n"
        f"  where: {blocked}\n"
        "  fix: MINDSPEED_CACHE=FOLDER with a writable folder, or --data PREFIX of data that mindspeed data "
        "prepare created\n"
    )


def test_a_plan_says_that_the_operators_cannot_be_built(mindspeed, blocked, monkeypatch):
    monkeypatch.setenv("MINDSPEED_CACHE", str(blocked))
    monkeypatch.setattr(availability, "native_variants", lambda platform: {"swiglu"} if platform == "cpu" else set())
    obstacle = f"{blocked} is not writable: {blocked.parent} is not a folder"
    text = f"the C++ operators are not built, so operators use their plain-torch references; {obstacle}"
    for verb in ("check", "plan"):
        plan = json.loads(mindspeed("features", verb, "swiglu", "--platform", "cpu", "--json").stdout)["plan"]
        assert {"kind": "warning", "feature": "MINDSPEED_CACHE", "text": text} in plan["rows"]
    shown = mindspeed("features", "plan", "swiglu", "--platform", "cpu", "--all").stdout
    assert f"warnings\n  MINDSPEED_CACHE: {text}\n" in shown
    operators = json.loads(mindspeed("ops", "list", "--json").stdout)["operators"]
    assert f"not built, and {obstacle}" in [row["why"] for row in operators if row["name"] == "swiglu"]


def test_a_plan_needs_no_cache(mindspeed, monkeypatch):
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("MINDSPEED_CACHE", raising=False)
    monkeypatch.setattr("pathlib.Path.home", _no_home)
    assert mindspeed("features", "check", "swiglu", *LAPTOP).exit_code == 0


def _no_home():
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (("features", "new", "acme-thing", "--package", "-o"), "choose another -o DIR"),
        (("docs", "--write"), "choose another --write FOLDER"),
        (("lock", *LAPTOP, "-o"), "choose another -o FILE"),
    ],
)
def test_a_folder_that_cannot_be_made_is_one_problem(mindspeed, blocked, words, fix):
    done = mindspeed(*words, blocked)
    assert (done.exit_code, done.stdout) == (3, "")
    first, second = done.stderr.splitlines()
    assert first.startswith(f"MS516 {blocked}")
    assert first.endswith("cannot be written: a part of its path is a file")
    assert second == f"  fix: {fix}"
