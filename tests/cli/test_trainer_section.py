"""Verbs that read a job file with a ``train`` section show and check what its run has."""

import json
from pathlib import Path

import pytest
import yaml

from tests.cli.conftest import LAPTOP

JOB = Path(__file__).parents[2] / "examples" / "pretrain_gpt.yaml"
LEVEL_1 = {"flash-attention", "matmul-add", "rms-norm", "rotary-embedding", "swiglu"}


@pytest.fixture
def job(tmp_path):
    def write(**data):
        file = tmp_path / "job.yaml"
        file.write_text(yaml.safe_dump(data))
        return file

    return write


def test_the_plan_of_a_job_file_is_that_of_its_run(mindspeed):
    done = mindspeed("features", "plan", "-f", JOB, *LAPTOP, "--world-size", 2, "--json")
    plan = json.loads(done.stdout)["plan"]
    names = {feature["name"] for feature in plan["features"]}
    assert names == LEVEL_1 | {"tensor-parallel", "sequence-parallel", "distributed-optimizer", "data-parallel"}


def test_without_a_train_section_nothing_is_assumed_of_the_model(mindspeed, job):
    done = mindspeed("features", "plan", "-f", job(features=["swiglu"]), *LAPTOP, "--json")
    assert "hidden_size" not in json.loads(done.stdout)["plan"]["world"]


@pytest.mark.parametrize("verb", [("features", "check"), ("features", "plan"), ("lock", "-o", "never.lock")])
def test_mistakes_of_the_section_are_found_with_all_others(mindspeed, job, verb):
    file = job(features=["swigl"], train={"lrr": 2}, world={"dtype": "fp8"})
    done = mindspeed(*verb, "-f", file, *LAPTOP)
    assert done.exit_code == 1
    assert [line for line in done.stderr.splitlines() if line.startswith("MS")] == [
        "MS305 unknown key 'lrr' in train",
        "MS301 dtype is 'fp8', which is not one of fp32, bf16, fp16",
        "MS201 the feature 'swigl' does not exist",
    ]


def test_a_word_that_no_field_knows_is_a_problem_with_a_line_to_copy(mindspeed):
    done = mindspeed("features", "check", "swiglu", "--activation", "siluu", *LAPTOP)
    assert done.stderr == (
        "MS301 activation is 'siluu', which is not one of gelu, silu, relu, squared_relu, quick_gelu\n"
        "  where: command line\n"
        "  fix: --activation silu\n"
    )


def test_the_fix_of_a_wrong_value_in_a_job_file_mends_it(mindspeed, tmp_path):
    (file := tmp_path / "job.yaml").write_text("world: {activation: siluu}\n")
    done = mindspeed("features", "check", "-f", file, "swiglu", *LAPTOP)
    assert (done.exit_code, done.stderr.splitlines()[1:]) == (1, ["  where: job file", "  fix: --activation silu"])
    assert mindspeed("features", "check", "-f", file, "swiglu", "--activation", "silu", *LAPTOP).exit_code == 0


def test_a_lock_of_the_trainer_has_its_values_and_preflight_finds_the_plan_agreement(mindspeed, tmp_path):
    file = tmp_path / "job.lock"
    assert mindspeed("lock", "-f", JOB, "--platform", "cpu", "--world-size", 2, "-o", file).exit_code == 0
    locked = json.loads(file.read_text())
    assert {feature["name"] for feature in locked["plan"]["features"]} >= LEVEL_1
    done = mindspeed("preflight", "--lock", file, "--json")
    (plan,) = [row for row in json.loads(done.stdout)["checks"] if row["name"] == "plan"]
    assert plan["passed"], plan


def test_without_takes_out_a_feature_of_the_job_file(mindspeed, job):
    file = job(features=["async-ddp", "swiglu"])
    done = mindspeed("features", "plan", "-f", file, "--without", "async-ddp", *LAPTOP, "--json")
    plan = json.loads(done.stdout)["plan"]
    assert "async-ddp" not in {feature["name"] for feature in plan["features"]}
    assert ("note", "async-ddp", "job file requests it, but command line removes it") in {
        (row["kind"], row["feature"], row["text"]) for row in plan["rows"]
    }


def test_one_source_that_asks_for_a_feature_and_takes_it_out_contradicts_itself(mindspeed):
    done = mindspeed("features", "check", "--features", "swiglu", "--without", "swiglu", *LAPTOP)
    assert done.stderr.splitlines()[0] == "MS210 swiglu is requested (command line) and removed (command line)"


@pytest.mark.parametrize("words", [(), ("--nproc", 1), ("--nproc-per-node", 1)], ids=str)
def test_a_launch_of_too_few_processes_names_the_option_that_starts_more(mindspeed, tmp_path, words):
    done = mindspeed("pretrain", "--tp", 2, "--platform", "cpu", "--run", tmp_path / "run", *words)
    assert done.stderr == (
        "MS302 world size 1 is not a multiple of tp x pp x cp = 2 x 1 x 1 = 2\n  fix: --nproc 2, or --tp 1\n"
    )


def test_every_verb_that_reads_the_section_finds_what_a_run_would_find(mindspeed, job):
    file = job(features=["profiler"], settings={"profiler": {"start": 11, "end": 12}}, train={"train_iters": 3})
    found = {
        tuple(verb): mindspeed(*verb, "-f", file, "--platform", "cpu", "--json")
        for verb in (("check",), ("features", "check"), ("features", "plan"), ("pretrain", "--dry-run"))
    }
    texts = {verb: [problem["message"] for problem in json.loads(done.stdout)["problems"]] for verb, done in found.items()}
    assert set(map(tuple, texts.values())) == {("profiler works in steps 12 to 12, but this run has steps 1 to 3",)}
