"""``mindspeed lock``: what it writes, and what reading it refuses."""

import json
import shlex
from dataclasses import replace

import pytest

from mindspeed import registry
from mindspeed.cli.plan_text import verdict
from mindspeed.engine.planning.lock import Lock, read_lock, require_match
from mindspeed.engine.resolution.environment import made_up
from mindspeed.problems import MindSpeedError
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
    asked = {"tp": 2, "seq_length": 64, "activation": "silu", "gated_linear_unit": True, "world_size": 4}
    assert asked.items() <= lock.job.pop("world").items()  # beside them the trainer's own values
    assert lock.job == {"features": ["sequence-parallel", "swiglu"], "train": {"train_iters": 100}, "platform": "cpu"}
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
    assert done.stderr.startswith("MS201 the feature 'swigl' does not exist\n")
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
        "  fix: write the file again with mindspeed lock -f JOB.yaml"
    )


@pytest.fixture
def locked(mindspeed, job, tmp_path):
    """Lock the job, and read the lock."""
    path = tmp_path / "job.lock"
    assert mindspeed("lock", "-f", job, "-o", path, *LAPTOP).exit_code == 0
    return read_lock(path)


def test_a_job_is_held_to_its_lock(locked):
    require_match(locked, registry.content_of(locked.plan, {}), "job.lock")


def test_the_first_difference_from_a_lock_is_named_and_the_others_follow(locked):
    content = dict(locked.content) | {
        "version megatron": "0.15.3",
        "source mindspeed.features.swiglu.layers": "0",
        "level": "1",
    }
    with pytest.raises(MindSpeedError) as caught:
        require_match(replace(locked, content=content), registry.content_of(locked.plan, {}), "job.lock")
    (problem,) = caught.value.problems
    assert (problem.code, problem.where) == ("MS618", "job.lock")
    assert problem.message == "this job differs from the locked one: it has megatron 0.16.1, the lock has 0.15.3"
    assert problem.chain[0] == "optimization level 2, the lock has 1"
    digest = locked.content["source mindspeed.features.swiglu.layers"]
    assert problem.chain[1:] == (f"mindspeed.features.swiglu.layers with content {digest}, the lock has content 0",)
    assert problem.fix_text == "start the locked job, or lock this one with mindspeed lock"


def test_a_size_that_only_the_launcher_knows_is_no_difference():
    environment = made_up("cpu", "0.16.1")
    plans = [
        registry.plan(["sequence-parallel"], world=world, environment=environment)
        for world in ({"tp": 2}, {"tp": 2, "world_size": 2})
    ]
    here = [registry.content_of(plan, {}) for plan in plans]
    require_match(Lock({}, plans[0], here[0]), here[1], "job.lock")
    with pytest.raises(MindSpeedError, match="it has no world world_size, the lock has world_size=2"):
        require_match(Lock({}, plans[1], here[1]), here[0], "job.lock")


@pytest.mark.parametrize("verb", ["run", "pretrain"])
def test_a_job_that_is_not_the_locked_one_does_not_start(mindspeed, verb, tmp_path, monkeypatch):
    script, path = tmp_path / "script.py", tmp_path / "job.lock"
    script.write_text("raise SystemExit('the script was started')")
    monkeypatch.setattr("mindspeed.engine.runtime.launch.launch", lambda *words: pytest.fail("the job was started"))
    request = ["--platform", "cpu", "--features", "swiglu", "--activation", "silu", "--gated-linear-unit"]
    assert mindspeed("lock", "-o", path, *request, "--seq-length", "64").exit_code == 0
    rest = ["--", script] if verb == "run" else ["--run", tmp_path / "run"]
    done = mindspeed(verb, "--lock", path, *request, "--seq-length", "32", *rest)
    assert done.exit_code == 1
    assert done.stderr.startswith("MS618 this job differs from the locked one: it has seq_length=32, the lock has 64")


def test_the_locked_job_starts(mindspeed, tmp_path, monkeypatch):
    path = tmp_path / "job.lock"
    assert mindspeed("lock", "-o", path, "--platform", "cpu", "--world-size", "2").exit_code == 0
    monkeypatch.setattr("mindspeed.engine.runtime.launch.launch", lambda *words: 7)
    done = mindspeed("run", "--lock", path, "--platform", "cpu", "--nproc", "2", "--", __file__)
    assert (done.exit_code, done.stderr) == (7, "")


def test_the_locked_job_of_the_trainer_starts_whatever_the_trainer_adds(mindspeed, tmp_path, monkeypatch):
    path, request = tmp_path / "job.lock", ["--platform", "cpu", "--features", "rms-norm", "--normalization", "RMSNorm"]
    assert mindspeed("lock", "-o", path, *request).exit_code == 0
    monkeypatch.setattr("mindspeed.engine.runtime.launch.launch", lambda *words: 7)
    done = mindspeed("pretrain", "--lock", path, *request, "--run", tmp_path / "run")
    assert (done.exit_code, done.stderr) == (7, "")


TRAINER = "features: [rms-norm]\nworld: {normalization: RMSNorm}\nplatform: cpu\n"


@pytest.mark.parametrize("train", ["", "train: {train_iters: 20}\n"])
def test_a_training_option_that_the_locked_job_does_not_have_is_refused(mindspeed, tmp_path, monkeypatch, train):
    path, file = tmp_path / "job.lock", tmp_path / "job.yaml"
    file.write_text(TRAINER + train)
    assert mindspeed("lock", "-o", path, "-f", file).exit_code == 0
    monkeypatch.setattr("mindspeed.engine.runtime.launch.launch", lambda *words: 7)
    start = ("pretrain", "--lock", path, "-f", file, "--run", tmp_path / "run")
    assert mindspeed(*start, "--log-interval", "3").exit_code == 7
    file.write_text(TRAINER + (train.replace("}", ", lr: 0.5}") or "train: {lr: 0.5}\n"))
    done = mindspeed(*start)
    assert done.exit_code == 1
    assert done.stderr.startswith("MS618 this job differs from the locked one: it has train.lr=0.5, the lock has 0.003")


def test_a_variable_that_changes_numbers_is_locked(mindspeed, tmp_path, monkeypatch):
    path, file = tmp_path / "job.lock", tmp_path / "job.yaml"
    file.write_text(TRAINER)
    for name in ("NCCL_ALGO", "NVIDIA_TF32_OVERRIDE"):
        monkeypatch.delenv(name, raising=False)
    assert mindspeed("lock", "-o", path, "-f", file).exit_code == 0
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    done = mindspeed("pretrain", "--lock", path, "-f", file, "--run", tmp_path / "run")
    assert done.stderr.startswith(
        "MS618 this job differs from the locked one: it has NVIDIA_TF32_OVERRIDE=1, the lock has no NVIDIA_TF32_OVERRIDE"
    )
    report = mindspeed("preflight", "--lock", path, "--free-disk", "0", "--free-shm", "0")
    (line,) = [line for line in report.stdout.splitlines() if "NVIDIA_TF32_OVERRIDE" in line]
    assert line.startswith("FAIL  variable-NVIDIA_TF32_OVERRIDE ")
    assert line.endswith("fix: unset NVIDIA_TF32_OVERRIDE")


SCRIPT = """
MODEL="--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64"
TRAINING="--micro-batch-size 1 --lr 1e-4 --train-samples 8"
torchrun --nproc-per-node 2 pretrain_gpt.py $MODEL $TRAINING --tensor-model-parallel-size 2 --own 3
"""
WORDS = shlex.split(
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 "
    "--lr 1e-4 --train-samples 8 --tensor-model-parallel-size 2 --own 3"
)


@pytest.fixture
def megatron_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mindspeed.engine.runtime.launch.launch", lambda *words: 7)
    (tmp_path / "pretrain_gpt.py").write_text(
        "import argparse\nfrom megatron.training import pretrain\nargparse.ArgumentParser().add_argument('--own')\n"
    )
    (tmp_path / "pretrain.sh").write_text(SCRIPT)


@pytest.mark.parametrize("words", [("pretrain.sh",), ("--", "torchrun", "--nproc-per-node", "2", "pretrain_gpt.py", *WORDS)])
def test_the_lock_of_a_training_command_holds_its_arguments(mindspeed, megatron_script, words):
    done = mindspeed("lock", "--platform", "cpu", *words)
    assert (done.exit_code, done.stderr) == (0, "")
    lock = read_lock("mindspeed.lock")
    assert lock.job["command"] == {"program": "pretrain_gpt.py", "arguments": WORDS, "processes": 2}
    options = {key: value for key, value in lock.content.items() if key.startswith("option")}
    assert len(options) == 10
    assert (options["option lr"], options["option others"]) == ("0.0001", "--own 3")
    checked = mindspeed("check", "--platform", "cpu", "--static", "pretrain.sh")
    assert checked.stdout.splitlines()[-1] == f"pretrain.sh:4: {verdict(lock.plan)}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ([], None),
        (["--lr", "2e-4"], "it has option lr 0.0002, the lock has 0.0001"),
        (["--bf16"], "it has dtype=bf16, the lock has fp32\n  because: option bf16 true, the lock has no option bf16"),
        (["--own", "4"], "it has option others --own 3 --own 4, the lock has --own 3"),
    ],
)
def test_the_locked_command_starts_and_a_changed_one_does_not(mindspeed, megatron_script, change, message):
    assert mindspeed("lock", "--platform", "cpu", "pretrain.sh").exit_code == 0
    run = ("run", "--platform", "cpu", "--nproc", "2", "--lock", "mindspeed.lock", "--", "pretrain_gpt.py", *WORDS, *change)
    done = mindspeed(*run)
    if message is None:
        assert (done.exit_code, done.stderr) == (7, "")
    else:
        assert done.exit_code == 1
        assert f"MS618 this job differs from the locked one: {message}\n" in done.stderr


def test_a_command_with_problems_or_two_scripts_give_no_lock(mindspeed, megatron_script, tmp_path):
    done = mindspeed("lock", "--platform", "cpu", "--", "pretrain_gpt.py", *WORDS, "--seed", "x")
    assert done.exit_code == 1
    assert "MS114 --seed is 'x', not a whole number" in done.stderr
    assert mindspeed("lock", "pretrain.sh", "other.sh").exit_code == 2
    assert not (tmp_path / "mindspeed.lock").exists()
