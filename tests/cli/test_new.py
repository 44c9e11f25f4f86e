"""``features new``: what it writes is in order, and its tests say what is still to be written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = [
    *("acme_cap/__init__.py", "acme_cap/algorithm.py", "acme_cap/feature.py", "acme_cap/layers.py", "acme_cap/py.typed"),
    *("README.md", "pyproject.toml", "tests/test_acme_cap.py"),
]


@pytest.fixture
def package(mindspeed, tmp_path):
    """A package acme-cap as it is written."""
    done = mindspeed("features", "new", "acme-cap", "--package", "-o", tmp_path)
    assert (done.exit_code, done.stderr) == (0, "")
    return tmp_path / "acme-cap"


@pytest.fixture
def checkout(mindspeed, tmp_path):
    """A checkout with the new built-in feature grad-cap."""
    (tmp_path / "mindspeed" / "features").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    assert mindspeed("features", "new", "grad-cap", "-o", tmp_path).exit_code == 0
    return tmp_path


def ruff(folder, *arguments):
    command = [sys.executable, "-m", "ruff", *arguments, "--no-cache", "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_a_package_has_these_files_and_the_next_steps_are_said(mindspeed, tmp_path):
    lines = mindspeed("features", "new", "acme-cap", "--package", "-o", tmp_path).stdout.splitlines()
    assert sorted(lines[: len(PACKAGE)]) == sorted(str(tmp_path / "acme-cap" / name) for name in PACKAGE)
    assert lines[len(PACKAGE) :] == [
        "",
        "next:",
        f"  cd {tmp_path / 'acme-cap'} && pip install -e .",
        "  write acme_cap/algorithm.py, then expected in tests/test_acme_cap.py",
        "  pytest tests",
        "  mindspeed features test acme-cap --parity",
    ]


def test_json_names_files_and_next_steps(mindspeed, tmp_path):
    data = json.loads(mindspeed("features", "new", "acme-cap", "--package", "-o", tmp_path, "--json").stdout)
    assert (list(data), data["name"], len(data["files"]), len(data["next"])) == (["name", "files", "next"], "acme-cap", 8, 4)


def test_a_new_package_passes_ruff(package):
    assert ruff(package, "check") == (0, "All checks passed!\n")
    assert ruff(package, "format", "--check")[0] == 0


def test_a_new_built_in_feature_passes_ruff(checkout):
    assert ruff(checkout, "check") == (0, "All checks passed!\n")
    assert ruff(checkout, "format", "--check")[0] == 0
    assert (checkout / "mindspeed/features/grad_cap/README.md").read_text().startswith("# grad-cap\n")
    assert (checkout / "tests/features/grad_cap/test_parity.py").is_file()


@pytest.mark.long
def test_a_new_package_passes_mypy(package):
    environment = {**os.environ, "MYPYPATH": os.pathsep.join([str(package), str(ROOT)])}
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--ignore-missing-imports"]
    files = ["acme_cap", "tests/test_acme_cap.py"]
    done = subprocess.run([*command, *files], cwd=package, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "Success: no issues found in 5 source files\n"


def put_on_path(package, monkeypatch):
    """Make the package importable, with its metadata, without installing it."""
    info = package / "acme_cap-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-cap\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[mindspeed.features]\nacme-cap = acme_cap.feature:AcmeCap\n")
    monkeypatch.setenv("PYTHONPATH", str(package))


@pytest.mark.long
def test_the_tests_of_a_new_package_fail_and_say_what_to_write(package, monkeypatch):
    put_on_path(package, monkeypatch)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    chosen = ["-k", "obvious_form or schema or metadata or references or targets"]
    done = subprocess.run([*command, *chosen], cwd=package, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 failed, 4 passed" in done.stdout
    assert "NotImplementedError: write the algorithm: the function acme_cap in acme_cap/algorithm.py" in done.stdout
    # the obvious form is asked for as soon as the algorithm is there
    test = (package / "tests" / "test_acme_cap.py").read_text()
    assert "write what acme_cap must compute, slow and obvious: expected in tests/test_acme_cap.py" in test


REFUSED = {
    "a malformed name": (["Acme_Cap", "--package"], "'Acme_Cap' is not lower-case words joined by dashes"),
    "the name of a feature": (["recompute", "--package"], "the feature name recompute is taken by mindspeed 0.1.0"),
    "the name of a package": (
        ["click", "--package"],
        "a package click can be imported already, which a new one would hide or be hidden by",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_refuses(mindspeed, tmp_path, case):
    arguments, text = REFUSED[case]
    done = mindspeed("features", "new", *arguments, "-o", tmp_path)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.splitlines()[0] == f"MS106 {text}"
    assert list(tmp_path.iterdir()) == []


def test_it_writes_over_nothing(mindspeed, package, checkout):
    done = mindspeed("features", "new", "acme-cap", "--package", "-o", package.parent)
    assert done.stderr == f"MS106 {package} is not empty\n  fix: choose another -o DIR\n"
    done = mindspeed("features", "new", "grad-cap", "-o", checkout)
    assert f"MS106 {checkout / 'mindspeed/features/grad_cap/feature.py'} exists\n" in done.stderr


def test_a_built_in_feature_needs_a_checkout(mindspeed, tmp_path):
    done = mindspeed("features", "new", "grad-cap", "-o", tmp_path)
    assert done.stderr == (
        f"MS106 {tmp_path} is no checkout of mindspeed\n  fix: -o CHECKOUT, or --package for a distribution of your own\n"
    )


def test_a_name_that_is_a_word_of_python_is_refused(mindspeed, tmp_path):
    done = mindspeed("features", "new", "class", "--package", "-o", tmp_path)
    assert (done.exit_code, list(tmp_path.iterdir())) == (1, [])
    assert done.stderr == (
        "MS106 'class' is a word of Python, so no module of that name can be imported\n"
        "  fix: choose another name, as in acme-class\n"
    )


def test_a_feature_is_added_to_a_package_of_ones_own(mindspeed, tmp_path):
    package = tmp_path / "acme"
    package.mkdir()
    (package / "__init__.py").write_text("")
    done = mindspeed("features", "new", "acme-clip", "--into", package)
    assert done.exit_code == 0, done.stderr
    made = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.py"))
    parts = ("__init__", "algorithm", "feature", "layers")
    assert made == ["acme/__init__.py", *(f"acme/acme_clip/{part}.py" for part in parts), "tests/test_acme_clip.py"]
    assert '"acme.acme_clip.layers:with_acme_clip"' in (package / "acme_clip" / "feature.py").read_text()
    assert "from acme.acme_clip.algorithm import acme_clip" in (tmp_path / "tests" / "test_acme_clip.py").read_text()
    assert 'add acme-clip = "acme.acme_clip.feature:AcmeClip" to [project.entry-points."mindspeed.features"]' in done.stdout
    assert mindspeed("features", "new", "acme-clip", "--into", package).stderr.startswith("MS106 ")


def test_a_folder_that_is_no_package_is_refused(mindspeed, tmp_path):
    done = mindspeed("features", "new", "acme-clip", "--into", tmp_path)
    assert done.stderr == f"MS106 {tmp_path} is no package: it has no __init__.py\n  fix: --into FOLDER/PACKAGE\n"
