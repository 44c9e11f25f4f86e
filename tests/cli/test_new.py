"""``features new``: the features that it writes are in order, and pass their own tests and the conformance suite."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed.workbench.conformance.suite import _unwritten_texts

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
    (tmp_path / "tests").mkdir()
    for file in ("pyproject.toml", "tests/__init__.py", "tests/conftest.py"):
        (tmp_path / file).write_text((ROOT / file).read_text())
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
        "  replace the texts that begin with TODO in acme_cap/feature.py",
        "  pytest tests",
        "  mindspeed features test acme-cap --parity",
    ]


def test_the_next_step_of_a_built_in_feature_is_one_command(mindspeed, tmp_path):
    (tmp_path / "mindspeed" / "features").mkdir(parents=True)
    lines = mindspeed("features", "new", "grad-cap", "-o", tmp_path).stdout.splitlines()
    assert lines[lines.index("next:") :] == [
        "next:",
        "  write mindspeed/features/grad_cap/algorithm.py, then expected in tests/features/grad_cap/test_algorithm.py",
        "  replace the texts that begin with TODO in mindspeed/features/grad_cap",
        "  make feature NAME=grad-cap",
    ]


def test_json_names_files_and_next_steps(mindspeed, tmp_path):
    data = json.loads(mindspeed("features", "new", "acme-cap", "--package", "-o", tmp_path, "--json").stdout)
    assert (list(data), data["name"], len(data["files"]), len(data["next"])) == (["name", "files", "next"], "acme-cap", 8, 5)


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


@pytest.fixture
def package_of(mindspeed, tmp_path, monkeypatch):
    """Make a package of a kind, and make it importable with its metadata, without installing it."""

    def make(kind):
        name = f"acme-{kind}"
        assert mindspeed("features", "new", name, "--package", "--kind", kind, "-o", tmp_path).exit_code == 0
        info = tmp_path / name / f"acme_{kind}-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
        entry = f"{name} = acme_{kind}.feature:Acme{kind.capitalize()}"
        (info / "entry_points.txt").write_text(f"[mindspeed.features]\n{entry}\n")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / name), str(ROOT)]))
        return tmp_path / name

    return make


def python(folder, *arguments):
    return subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False)


def write_texts(folder):
    """Write the texts that the template leaves to the author."""
    for file in [*folder.rglob("feature.py"), *folder.rglob("README.md")]:
        file.write_text(file.read_text().replace("TODO: ", ""))


def test_conformance_fails_for_the_texts_of_the_template_that_nobody_replaced(package, monkeypatch):
    monkeypatch.syspath_prepend(str(package))
    feature = importlib.import_module("acme_cap.feature").AcmeCap
    assert list(_unwritten_texts(feature)) == [
        "the summary is that of the template: TODO: write in one line what acme-cap does",
        "the description of the setting strength is that of the template: TODO: write in a few words what this number means",
    ]
    (package / "acme_cap" / "README.md").write_text("# acme-cap\n\nTODO: what it does\n")
    assert list(_unwritten_texts(feature))[2:] == ["README.md has a line of the template: TODO: what it does"]
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme_cap"]:
        del sys.modules[name]  # which a later test would find in the way of its own package


@pytest.mark.parametrize("kind", ["hook", "op"])
def test_every_kind_passes_ruff_and_has_the_files_of_the_first(package_of, kind):
    package = package_of(kind)
    assert ruff(package, "check") == (0, "All checks passed!\n")
    assert ruff(package, "format", "--check")[0] == 0
    files = sorted(path.relative_to(package).as_posix() for path in package.rglob("*.*") if "dist-info" not in str(path))
    assert files == sorted(name.replace("acme_cap", f"acme_{kind}") for name in PACKAGE)


def test_a_hook_a_patch_and_an_operator_are_declared_as_such(package_of):
    texts = {kind: {path.name: path.read_text() for path in package_of(kind).rglob("*.py")} for kind in ("hook", "patch", "op")}
    assert ("def gradients_ready(" in texts["hook"]["feature.py"], "Wrap(" in texts["hook"]["feature.py"]) == (True, False)
    assert ("def gradients_ready(" in texts["patch"]["feature.py"], "Wrap(" in texts["patch"]["feature.py"]) == (False, True)
    assert '@torch.library.custom_op("acme_op::acme_op"' in texts["op"]["algorithm.py"]


def test_an_unknown_kind_is_a_usage_error(mindspeed, tmp_path):
    done = mindspeed("features", "new", "acme-cap", "--package", "--kind", "slot", "-o", tmp_path)
    assert (done.exit_code, list(tmp_path.iterdir())) == (2, [])


@pytest.mark.long
@pytest.mark.parametrize("kind", ["patch", "hook", "op"])
def test_a_new_package_passes_the_conformance_suite_and_its_own_tests(package_of, kind):
    package = package_of(kind)
    done = python(package, "-m", "mindspeed", "features", "test", f"acme-{kind}")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, f"acme-{kind}: 1 feature, 10 checks, 1 failed")
    write_texts(package)
    done = python(package, "-m", "mindspeed", "features", "test", f"acme-{kind}", "--parity")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, f"acme-{kind}: 1 feature, 10 checks, none failed"), (
        done.stdout
    )
    done = python(package, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 passed" in done.stdout


@pytest.mark.long
def test_a_new_hook_changes_gradients_that_kernels_add_to_the_buffer(package_of):
    """matmul-add adds the gradients of linear layers to ``main_grad``, which no hook of a tensor sees."""
    given = ["--set", "acme-hook.strength=2", "--features", "matmul-add", "--json"]
    done = python(package_of("hook"), "-m", "mindspeed", "features", "verify", "acme-hook", *given)
    checks = json.loads(done.stdout)["checks"]
    doubled = {
        check["what"]: round(check["largest_difference"], 6) for check in checks if check["what"].startswith("gradient of")
    }
    assert len(doubled) > 20
    assert set(doubled.values()) == {1.0}, doubled


REFUSED = {
    "a malformed name": (
        ["Acme_Cap", "--package"],
        "the feature name 'Acme_Cap' does not consist of lower-case words joined by dashes",
    ),
    "the name of a feature": (["recompute", "--package"], "mindspeed 0.2.0 already provides a feature named recompute"),
    "the name of a package": (
        ["click", "--package"],
        "a package click can already be imported, and the new one would conflict with it",
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
        f"MS106 {tmp_path} is not a checkout of mindspeed\n  fix: -o CHECKOUT, or --package for a separate distribution\n"
    )


def test_a_name_that_is_a_word_of_python_is_refused(mindspeed, tmp_path):
    done = mindspeed("features", "new", "class", "--package", "-o", tmp_path)
    assert (done.exit_code, list(tmp_path.iterdir())) == (1, [])
    assert done.stderr == (
        "MS106 'class' is a keyword of Python, so no module with that name can be imported\n"
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
    assert done.stderr == (f"MS106 {tmp_path} is not a package: it has no __init__.py\n  fix: --into FOLDER/PACKAGE\n")
