"""``mindspeed features diff``: what two jobs do not share, in whatever form each was kept."""

import argparse
import json
import os
import pickle

import pytest

JOB = "features: [recompute]\nworld: {tp: 2, world_size: 2}\nplatform: cpu\n"


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def differences(done):
    return {(row["kind"], row["name"]): (row["first"], row["second"]) for row in json.loads(done.stdout)["differences"]}


def test_two_job_files_differ_in_features_settings_sizes_and_arguments_with_their_sources(mindspeed, job, tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text(
        JOB.replace("tp: 2", "tp: 1") + "settings: {recompute: {granularity: full, method: uniform, num_layers: 1}}\n"
    )
    done = mindspeed("features", "diff", job, other)
    assert done.exit_code == 1
    rows = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "setting recompute.granularity selective (default) full (job file)" in rows
    assert "feature tensor-parallel mindspeed 0.2.0 (the tensor-parallel size is 2) not set" in rows
    assert "world tp 2 1" in rows
    assert "argument tensor_model_parallel_size 2 (tensor-parallel) not set" in rows
    assert differences(mindspeed("features", "diff", job, other, "--json"))["world", "tp"] == ("2", "1")


def test_equal_jobs_have_no_difference_in_any_form(mindspeed, job, tmp_path):
    plan, lock = tmp_path / "plan.json", tmp_path / "job.lock"
    plan.write_text(mindspeed("features", "plan", "-f", job, "--json").stdout)
    mindspeed("lock", "-f", job, "-o", lock)
    for one, other in ((job, job), (job, plan), (job, lock), (plan, lock)):
        done = mindspeed("features", "diff", one, other)
        assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, "no difference"), (one, other, done.stdout)


def test_kinds_that_one_form_alone_keeps_are_not_compared_and_are_named(mindspeed, job, tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text(mindspeed("features", "plan", "-f", job, "--json").stdout)
    done = mindspeed("features", "diff", plan, job)
    assert f"not compared, because only {job} has them: version" in done.stdout.splitlines()


def run_folder(path, mindspeed, job, losses, **options):
    path.mkdir()
    plan = json.loads(mindspeed("features", "plan", "-f", job, "--json").stdout)["plan"]
    (path / "plan.json").write_text(json.dumps(plan))
    (path / "process.json").write_text(json.dumps({"config": {"lr": 0.003, "run": str(path)} | options}))
    rows = [{"step": step, "loss": loss, "seconds": step + len(path.name)} for step, loss in losses]
    (path / "log.jsonl").write_text("\n".join(map(json.dumps, rows)) + '\n{"step": 9, "lo')
    return path


def test_of_two_runs_the_first_step_with_another_loss_is_named(mindspeed, job, tmp_path):
    a = run_folder(tmp_path / "a", mindspeed, job, [(1, 5.0), (2, 4.0), (3, 3.0)])
    b = run_folder(tmp_path / "bb", mindspeed, job, [(1, 5.0), (2, 9.0), (2, 4.0), (3, 3.5)], lr=0.001)
    done = mindspeed("features", "diff", a, b, "--json")
    assert done.exit_code == 1
    assert differences(done) == {("option", "lr"): ("0.003", "0.001")}
    assert json.loads(done.stdout)["step"] == {"step": 3, "number": "loss", "first": 3.0, "second": 3.5}
    equal = mindspeed("features", "diff", a, a)
    assert (equal.exit_code, equal.stdout.splitlines()[1:]) == (
        0,
        ["the 3 steps that both runs logged are equal", "no difference"],
    )


class Harm:
    """An object that writes a file when it is unpickled as usual."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def megatron_checkpoint(path, **values):
    import torch

    folder = path / "iter_0000010"
    folder.mkdir(parents=True)
    (path / "latest_checkpointed_iteration.txt").write_text("10\n")
    arguments = argparse.Namespace(num_layers=4, hidden_size=64, rank=0, **values)
    torch.save({"args": arguments, "rng": torch.zeros(3), "iteration": 10}, folder / "common.pt")
    return path


def test_checkpoints_of_megatron_lm_are_compared_by_their_arguments_and_run_no_code(mindspeed, tmp_path):
    a = megatron_checkpoint(tmp_path / "a", tensor_model_parallel_size=1)
    b = megatron_checkpoint(tmp_path / "b", tensor_model_parallel_size=2, harm=Harm(tmp_path / "harm"))
    found = differences(mindspeed("features", "diff", a, b, "--json"))
    assert found["world", "tp"] == ("1", "2")
    assert found["option", "tensor_model_parallel_size"] == ("1", "2")
    assert found["option", "harm"] == (None, f"system('touch {tmp_path / 'harm'}')")
    assert not (tmp_path / "harm").exists()
    assert ("option", "rank") not in found


@pytest.mark.parametrize("text", ["[1]", "{", '{"plan": 3}', '{"job": {}, "format": 9}'])
def test_what_is_none_of_the_forms_is_refused_by_name(mindspeed, job, tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    done = mindspeed("features", "diff", job, path)
    assert done.exit_code in (1, 3)
    assert str(path) in done.stderr
    assert "Traceback" not in done.stderr


def test_a_damaged_checkpoint_is_refused_by_name(mindspeed, job, tmp_path):
    folder = tmp_path / "c"
    folder.mkdir()
    assert "neither the folder of a run nor a checkpoint" in mindspeed("features", "diff", job, folder).stderr
    for content in (b"no archive", pickle.dumps(3)):
        (folder / "common.pt").write_bytes(content)
        done = mindspeed("features", "diff", folder, job)
        assert (done.exit_code, "the arguments in the checkpoint cannot be read" in done.stderr) == (1, True)
