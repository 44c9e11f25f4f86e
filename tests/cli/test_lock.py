"""``mindspeed lock``: what it writes, and what reading it refuses."""

from __future__ import annotations

import json

import pytest

from mindspeed import registry
from mindspeed.activation.lock import read_lock
from mindspeed.plugins.problems import MindSpeedError
from tests.cli.conftest import LAPTOP

JOB = """
features: [sequence-parallel, swiglu]
world: {tp: 2, world_size: 4, seq_length: 64, activation: silu, gated_linear_unit: true}
train: {train_iters: 100}
"""


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def test_a_lock_holds_request_plan_versions_and_contents(mindspeed, job, tmp_path):
    path = tmp_path / "job.lock"
    done = mindspeed("lock", "-f", job, "-o", path, *LAPTOP, "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    said = json.loads(done.stdout)
    lock = read_lock(path)
    assert said == {"lock": str(path), "digest": lock.plan.digest, "versions": lock.versions(), "files": said["files"]}
    operators = {name for name in lock.plan.names if registry.catalog().specs[name].level == 1}
    assert "swiglu" in operators
    others = [name for name in lock.plan.names if name not in operators]
    assert others == ["data-parallel", "tensor-parallel", "sequence-parallel"]
    assert lock.job == {
        "features": ["sequence-parallel", "swiglu"],
        "world": {"tp": 2, "seq_length": 64, "activation": "silu", "gated_linear_unit": True, "world_size": 4},
        "train": {"train_iters": 100},
        "platform": "cpu",
    }
    assert {"mindspeed", "python", "megatron", "torch"} <= lock.versions().keys()
    assert "source mindspeed.features.swiglu.layers" in lock.content
    assert "target megatron.core.fusions.fused_bias_swiglu" in lock.content
    assert not [key for key in lock.content if key.startswith("variable ")]


def test_the_same_job_gives_the_same_lock(mindspeed, job, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for path in (first, second):
        assert mindspeed("lock", "-f", job, "-o", path, *LAPTOP).exit_code == 0
    assert first.read_text() == second.read_text()


def test_a_job_with_problems_gives_no_lock(mindspeed, tmp_path):
    path = tmp_path / "job.lock"
    done = mindspeed("lock", "--features", "swigl", "-o", path, *LAPTOP)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == "MS201 there is no feature 'swigl'\n  where: command line\n  fix: did you mean swiglu?\n"
    assert not path.exists()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "FileNotFoundError: [Errno 2] No such file or directory: '{path}'"),
        ("[", "JSONDecodeError: Expecting value: line 1 column 2 (char 1)"),
        ('{"format": 9}', "ValueError: format 9 is not 1"),
    ],
)
def test_a_damaged_lock_is_refused(tmp_path, text, why):
    path = tmp_path / "job.lock"
    if text is not None:
        path.write_text(text)
    with pytest.raises(MindSpeedError) as caught:
        read_lock(path)
    assert str(caught.value) == (
        f"MS509 the lock file cannot be read: {why.format(path=path)}\n  where: {path}\n"
        "  fix: write it again with mindspeed lock -f JOB.yaml"
    )
