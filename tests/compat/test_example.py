"""The example repository in MindSpeed's style replaces the list of features and trains."""

import ast
import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.warm_processes import warm_python

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "mindspeed_style"
OLD_NAMES = {"mindspeed.args_utils", "mindspeed.arguments", "mindspeed.features_manager", "mindspeed.patch_utils"}


def train(folder, *argv):
    env = os.environ | {
        "PYTHONPATH": f"{ROOT}:{EXAMPLE}",
        "MINDSPEED_PLATFORM": "cpu",
        "MINDSPEED_OPS": "reference",
        "MINDSPEED_REPORT": str(folder / "report.json"),
    }
    command = [*warm_python(), str(EXAMPLE / "pretrain.py"), *argv]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder, check=False)


@pytest.mark.parametrize("file", sorted(EXAMPLE.rglob("*.py")), ids=lambda file: file.name)
def test_the_example_knows_only_the_old_names(file):
    imported = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module)
        elif isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
    ours = {name for name in imported if name.split(".")[0] == "mindspeed"}
    assert {name for name in ours if not any(name == old or name.startswith(f"{old}.") for old in OLD_NAMES)} == set()


@pytest.mark.long
def test_the_example_trains_and_its_features_and_ours_are_reached(tmp_path):
    done = train(
        tmp_path, "--scale-embedding", "--scale-embedding-factor", "8", "--truncated-init", "--use-fused-swiglu", "--steps", "3"
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True)
    assert float(done.stdout.split()[-1]) == 0.04  # two deviations of Megatron's 0.02
    note = "mindspeed: compat: --use-fused-swiglu switches on swiglu; the new spelling is --features swiglu\n"
    assert done.stderr.count(note) == 1
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    features = {feature["name"]: feature for feature in report["features"]}
    assert set(features) == {"compat:scale-embedding", "compat:truncated-init", "swiglu"}
    assert [point["calls"] for point in features["compat:scale-embedding"]["points"]] == [3]
    assert features["compat:truncated-init"]["points"][0]["state"] == "reached"


@pytest.mark.budget(10)
def test_a_refusal_of_a_feature_of_the_example_ends_it_before_anything_is_built(tmp_path):
    done = train(tmp_path, "--scale-embedding", "--scale-embedding-factor", "-1")
    assert done.returncode == 1
    assert (
        "MS304 compat:scale-embedding: the checks of the feature refuse the arguments: --scale-embedding-factor must be "
        "positive\n"
    ) in done.stderr
    assert "step" not in done.stdout
