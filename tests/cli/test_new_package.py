"""A new third-party package from nothing: made, filled with ten lines, installed, tested, and seen by every verb."""

import json

import pytest
from click.testing import CliRunner

from mindspeed.cli import main
from mindspeed.workbench.conformance.suite import CHECKS
from tests.plugins.test_third_party import Environment

ALGORITHM = '''
"""Cap the output of the MLP."""

import torch
from torch import Tensor


def acme(x_SBH: Tensor, strength: float) -> Tensor:
    """No element is larger than ``strength`` in size: [S, B, H] -> [S, B, H]."""
    larger = x_SBH.detach().abs() > strength
    return torch.where(larger, x_SBH.detach().sign() * strength, x_SBH)
'''
EXPECTED = "    return torch.stack([element * strength for element in x.flatten()]).reshape(x.shape)"


def make(folder):
    """``features new acme --package`` with the algorithm and its obvious form written."""
    CliRunner().invoke(main, ["features", "new", "acme", "--package", "-o", str(folder)], catch_exceptions=False)
    package = folder / "acme"
    (package / "acme" / "algorithm.py").write_text(ALGORITHM.lstrip())
    test = package / "tests" / "test_acme.py"
    assert EXPECTED in test.read_text()
    test.write_text(test.read_text().replace(EXPECTED, "    return x.clamp(-strength, strength)"))
    feature = package / "acme" / "feature.py"
    written = {
        "TODO: write in one line what acme does.": "Cap the output of the MLP.",
        "TODO: write in a few words what this number means": "largest element",
        "Field(1.0,": "Field(1e4,",
    }
    for old, new in written.items():
        assert old in feature.read_text()
        feature.write_text(feature.read_text().replace(old, new))
    return package


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """An environment in which the package is installed, and the package's folder."""
    environment = Environment(tmp_path_factory.mktemp("environment"))
    package = make(tmp_path_factory.mktemp("made"))
    environment.install(package)
    return environment, package


@pytest.mark.budget(8)
def test_it_is_listed_planned_drawn_explained_and_documented(installed):
    environment, _ = installed
    (row,) = environment.features()["acme"]
    assert (row["distribution"], row["version"], row["state"]) == ("acme", "0.1.0", "ok")
    assert row["summary"] == "Cap the output of the MLP"
    laptop = ("--platform", "cpu", "--megatron", "0.16.1", "--optimization-level", "2")
    plan = json.loads(environment.mindspeed("features", "plan", "acme", *laptop, "--json").stdout)["plan"]
    assert [feature["name"] for feature in plan["features"] if feature["level"] > 1] == ["acme"]
    assert [patch["site"] for patch in plan["patches"] if patch["owner"] == "acme"] == [
        "megatron.core.transformer.mlp:MLP.forward"
    ]
    assert '  "acme";' in environment.mindspeed("features", "graph", "acme", *laptop, "--format", "dot").stdout.splitlines()
    explained = environment.mindspeed("features", "explain", "acme", "--features", "acme", *laptop).stdout
    assert "  acme.strength = 10000.0  (default)\n" in explained
    assert "    code     acme.layers:with_acme  " in explained
    assert environment.mindspeed("docs", "acme").stdout.startswith("# acme\n")
    schema = json.loads(environment.mindspeed("features", "schema").stdout)
    assert schema["properties"]["settings"]["properties"]["acme"]["properties"]["strength"]["default"] == 1e4


@pytest.mark.long
def test_it_passes_the_conformance_suite_a_line_for_each_check(installed):
    environment, _ = installed
    done = environment.mindspeed("features", "test", "acme")
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert lines[:4] == [
        "acme",
        "  schema       ok       1 setting, all described; defaults are valid; values survive --set, YAML and JSON",
        "  metadata     ok       0 constraints, all on known names; hooks match",
        "  references   ok       1 of 1 resolve",
    ]
    assert [line[2:22].split("  ")[0].strip() for line in lines[1:-1]] == list(CHECKS)
    assert [line[15:22].strip() for line in lines[1:-1]] == ["ok"] * 8 + ["not run"] * 2
    assert lines[-1] == "acme: 1 feature, 10 checks, none failed"


@pytest.mark.long
def test_its_own_tests_pass_with_the_claim_proven(installed):
    environment, package = installed
    done = environment.run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(package / "tests"))
    assert done.returncode == 0, done.stdout
    assert "12 passed" in done.stdout


@pytest.mark.long
def test_it_installs_as_its_readme_says(tmp_path):
    environment = Environment(tmp_path / "environment")
    environment.pip("install", "--no-deps", make(tmp_path))  # in a build environment of its own, from a package index
    assert environment.features()["acme"][0]["state"] == "ok"
