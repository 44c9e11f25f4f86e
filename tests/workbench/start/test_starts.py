"""What check accepts starts: drawn jobs and Megatron-LM commands, every distinct rank up to the end of its first step."""

import json
import os
import typing
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from mindspeed.cli import main
from mindspeed.engine.resolution.request import Layer, parse_assignments
from mindspeed.plugins.answers import with_contribution
from mindspeed.problems import MindSpeedError, ResolutionError
from mindspeed.registry import probe
from mindspeed.workbench.lint.launched_command import command_of_words
from mindspeed.workbench.start import script_start, trainer_start
from mindspeed.workbench.training.job import Job, make_job
from mindspeed.workbench.verification.pool import WorkerPool
from tests.drawn_jobs import DrawnJob, draw
from tests.megatron_lm.checkout import MOE, TINY, VARIABLE


def job_of(drawn: DrawnJob) -> Job:
    """The job of ``mindspeed pretrain`` with these values."""
    settings = parse_assignments([f"{name}={value}" for name, value in drawn.settings.items()], "--set")
    layer = Layer("drawn", features=drawn.features, settings=settings, world=drawn.world)
    return make_job([layer], {}, replace(probe("cpu"), world_size=drawn.world["world_size"]))


def is_accepted(drawn: DrawnJob) -> bool:
    try:
        job_of(drawn)
    except MindSpeedError:
        return False
    return True


QUICK = (147,)
"""Seeds of the default run; the others are long."""


@pytest.mark.budget(20)
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[pytest.mark.long] * (seed not in QUICK)) for seed in range(300)])
def test_a_drawn_job_that_is_accepted_starts(seed, pool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    drawn = draw(seed, is_accepted)
    try:
        trainer_start.start(pool, job_of(drawn))
    except MindSpeedError as error:
        pytest.fail(f"{' '.join(drawn.words)}\n{error}")


def test_what_a_rank_refuses_is_found(pool):
    """A job that gets past the check by force: the start refuses it as a rank would."""
    drawn = DrawnJob(0, {"world_size": 2, "num_experts": 4, "pp": 1})
    job = job_of(drawn)
    refused = replace(job, plan=replace(job.plan, world=with_contribution(job.plan.world, (("router_topk", 5),))))
    with pytest.raises(MindSpeedError, match="MS607"):
        trainer_start.start(pool, refused)


@pytest.fixture(scope="module")
def checkout():
    if not os.environ.get(VARIABLE):
        pytest.skip(f"{VARIABLE} names no Megatron-LM")
    return Path(os.environ[VARIABLE])


@pytest.fixture(scope="module")
def at_checkout(checkout):
    with WorkerPool([str(checkout)]) as pool:
        yield pool


COMMANDS = {
    "stages": (4, ["--pipeline-model-parallel-size", "2", "--bf16", "--features", "zero-bubble"]),
    "experts": (
        4,
        [
            *MOE,
            *["--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall", "--disable-bias-linear"],
            "--features",
            "moe-alltoall-overlap",
        ],
    ),
    "long sequences": (2, ["--context-parallel-size", "2", "--features", "ring-attention"]),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_of_megatron_starts(name, checkout, at_checkout):
    size, words = COMMANDS[name]
    launch = ["torchrun", "--nproc-per-node", str(size), "pretrain_gpt.py", *TINY, *words]
    command = command_of_words([*launch, "--train-iters", "4", "--vocab-size", "127"])
    script_start.start(at_checkout, command, checkout, probe("cpu"))


def test_a_command_with_arguments_in_a_file_is_not_started(tmp_path):
    command = command_of_words(["torchrun", "--nproc-per-node", "2", "pretrain_gpt.py", "--yaml-cfg", "run.yaml"])
    with pytest.raises(ResolutionError, match=r"run.yaml \(--yaml-cfg\) gives data and a tokenizer"):
        script_start.start(None, command, tmp_path, probe("cpu"))


def test_a_megatron_that_needs_a_newer_python_is_not_started(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text('[project]\nrequires-python = ">=99"\n')
    monkeypatch.delattr(typing, "override", raising=False)
    with pytest.raises(ResolutionError, match="needs Python >=99"):
        script_start.start(None, command_of_words(["python", "pretrain_gpt.py"]), tmp_path, probe("cpu"))


def test_check_starts_a_job_file_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "job.yaml"
    job = "settings: {profiler: {start: 0, end: 9}}\nworld: {world_size: 2, num_layers: 2}\ntrain: {style: gpt2}\n"
    file.write_text(f"features: [recompute, profiler]\n{job}")
    done = CliRunner().invoke(main, ["check", "--start", "-f", str(file), "--json"])
    assert (done.exit_code, json.loads(done.stdout)["problems"]) == (0, [])
    assert [*tmp_path.iterdir()] == [file]


def test_a_job_without_a_number_of_processes_cannot_be_started(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text("world: {num_layers: 2}\n")
    done = CliRunner().invoke(main, ["check", "--start", "--platform", "cpu", "-f", str(file)])
    assert "MS307 ranks cannot be started without world_size\n  fix: --world-size N\n" in done.stdout


def test_a_command_without_its_megatron_cannot_be_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["torchrun", "--nproc-per-node", "2", "pretrain_gpt.py", *TINY, "--train-iters", "2"]
    done = CliRunner().invoke(main, ["check", "--start", "--static", "--platform", "cpu", "--", *words])
    assert done.exit_code == 3
    assert "MS502 the command cannot be started, because its Megatron-LM is not here\n  fix: --checkout FOLDER" in done.stdout
