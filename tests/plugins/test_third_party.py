"""Packages of others, really installed with pip into an environment of their own, and removed again."""

import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "third_party_feature"

PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "{distribution}"
version = "2.0"
[project.entry-points."mindspeed.features"]
{name} = "{module}"
[tool.setuptools]
py-modules = ["{module}"]
"""
FEATURE = """
from mindspeed.plugins import Category, Feature, FeatureSpec, Requires
class Made(Feature):
    spec = FeatureSpec("{name}", Category.TOOL, constraints=({constraints}))
"""


class Environment:
    """A virtual environment that sees the packages of this one."""

    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        self.python = folder / "bin" / "python"
        (site,) = folder.glob("lib/python3*/site-packages")
        (site / "parent.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")

    def pip(self, *arguments: object) -> None:
        command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(self.python)]
        subprocess.run([*command, *map(str, arguments)], check=True)

    def install(self, *projects: Path) -> None:
        self.pip("install", "--no-build-isolation", "--no-deps", "--no-index", *projects)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(self.python), *arguments], capture_output=True, text=True, check=False)

    def features(self, *options: str) -> dict[str, list[dict[str, object]]]:
        """Rows of ``features list --json`` by name."""
        done = self.mindspeed("features", "list", "--json", *options)
        assert done.returncode == 0, done.stderr
        rows: dict[str, list[dict[str, object]]] = {}
        for row in json.loads(done.stdout)["features"]:
            rows.setdefault(row["name"], []).append(row)
        return rows

    def mindspeed(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run("-c", "from mindspeed.cli import main; main()", *arguments)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return Environment(tmp_path_factory.mktemp("environment"))


@pytest.fixture
def project(tmp_path):
    """Write a project with one feature and return its folder."""

    def write(distribution, name, source):
        folder = tmp_path / distribution
        folder.mkdir()
        module = distribution.replace("-", "_")
        (folder / "pyproject.toml").write_text(PROJECT.format(distribution=distribution, name=name, module=module))
        (folder / f"{module}.py").write_text(source)
        return folder

    return write


ACTIVATE = """
import mindspeed
from megatron.core.models.common.language_module.language_module import LanguageModule
before = id(LanguageModule.compute_language_model_loss)  # a name for the function itself would be rebound with all others
plan = mindspeed.plan(["acme-z-loss"], settings={"acme-z-loss": {"coefficient": 0.001}}, platform="cpu")
report = mindspeed.activate(plan)
assert [feature.name for feature in plan.features if feature.level == 2] == ["acme-z-loss"], plan.names
assert report.features == plan.names
assert id(LanguageModule.compute_language_model_loss) != before
mindspeed.deactivate()
assert id(LanguageModule.compute_language_model_loss) == before
"""


@pytest.mark.long
def test_the_example_is_installed_listed_activated_and_removed(environment, tmp_path):
    assert "acme-z-loss" not in environment.features()
    copy = shutil.copytree(EXAMPLE, tmp_path / "example")  # setuptools builds inside the folder
    environment.install(copy)
    assert environment.features()["acme-z-loss"] == [
        {
            "name": "acme-z-loss",
            "summary": "Keep the normalizer of the output softmax near one, against drifting logits",
            "stability": "prototype",
            "level": 2,
            "slots": ["z-loss"],
            "platforms": ["npu", "cuda", "cpu"],
            "distribution": "acme-mindspeed",
            "version": "0.3.0",
            "state": "ok",
            "error": None,
        }
    ]
    (row,) = environment.features("--no-import")["acme-z-loss"]
    assert (row["distribution"], row["version"], row["state"]) == ("acme-mindspeed", "0.3.0", "not loaded")
    done = environment.run("-c", ACTIVATE)
    assert done.returncode == 0, done.stderr
    own_tests = environment.run("-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", str(copy / "tests"))
    assert own_tests.returncode == 0, own_tests.stdout
    assert "14 passed, 2 skipped" in own_tests.stdout, "the suite without its two proofs, and the tests of the package"
    assert "trains a small model; --parity runs it" in own_tests.stdout
    environment.pip("uninstall", "--yes", "acme-mindspeed")
    assert "acme-z-loss" not in environment.features()


@pytest.mark.long
def test_faulty_packages_are_rows_that_say_what_is_wrong_and_harm_nobody(environment, project):
    broken = project("acme-broken", "acme-broken", "import package_that_is_not_installed\n")
    lonely = project(
        "acme-lonely", "acme-lonely", FEATURE.format(name="acme-lonely", constraints='Requires("no-such-feature"),')
    )
    twins = [project(name, "twin", FEATURE.format(name="twin", constraints="")) for name in ("acme-twin", "bolt-twin")]
    environment.install(broken, lonely, *twins)
    rows = environment.features()
    assert rows["tensor-parallel"][0]["state"] == "ok"
    errors = {name: [row["error"] for row in rows[name]] for name in ("acme-broken", "acme-lonely", "twin")}
    shared = "several packages provide the feature twin: acme-twin 2.0 and bolt-twin 2.0"
    assert errors == {
        "acme-broken": [
            "feature acme-broken cannot be loaded: ModuleNotFoundError: No module named 'package_that_is_not_installed'"
        ],
        "acme-lonely": ["feature acme-lonely declares Requires on no-such-feature, which no installed feature provides"],
        "twin": [shared, shared],
    }
    listing = environment.mindspeed("features", "list").stdout
    assert (
        "\nMS101 feature acme-broken cannot be loaded: ModuleNotFoundError: No module named 'package_that_is_not_installed'\n"
        "  where: acme-broken 2.0, acme_broken\n"
        "  fix: fix or uninstall acme-broken\n"
    ) in listing
    done = environment.mindspeed("features", "check", "acme-broken", "acme-lonely", "twin", "--platform", "cpu")
    assert done.returncode == 1
    assert [line.split()[0] for line in done.stderr.splitlines() if line.startswith("MS")] == ["MS101", "MS103", "MS102"]
    assert done.stdout == ""
    environment.pip("uninstall", "--yes", "acme-broken", "acme-lonely", "acme-twin", "bolt-twin")
    assert environment.features().keys().isdisjoint(errors)
