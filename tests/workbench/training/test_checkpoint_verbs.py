"""``mindspeed checkpoint``: list, inspect, verify and compare, on a checkpoint of one tensor."""

import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mindspeed.cli import main
from mindspeed.engine.resolution.request import Layer
from mindspeed.workbench.training.checkpoints import MANIFEST, checkpoint_path, damages, file_sizes, read_manifest
from tests.workbench.training.conftest import MakeRun


@pytest.fixture
def run(make_run: MakeRun) -> Path:
    """A run with one checkpoint of a tensor, as torch's distributed checkpoints hold it."""
    import torch
    from torch.distributed import checkpoint

    run = make_run(Layer("job file"), steps=(2,))
    folder = checkpoint_path(run, 2)
    (folder / ".metadata").unlink()
    checkpoint.save({"weight": torch.arange(1000.0)}, checkpoint_id=folder, no_dist=True)
    torch.save({"step": 2}, folder / "common.pt")
    (folder / "metadata.json").write_text("{}")
    manifest = read_manifest(folder)
    (folder / MANIFEST).unlink()
    replace(manifest, files=file_sizes(folder)).write(folder)
    return run


CPU = ("--platform", "cpu", "--world-size", "1")


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["checkpoint", *map(str, arguments)], catch_exceptions=False)


def answer(*arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(invoke(*arguments, "--json").stdout)
    return found


@pytest.mark.budget(30)
def test_checkpoints_are_listed_with_what_is_wrong_with_them(run: Path) -> None:
    shutil.copytree(checkpoint_path(run, 2), checkpoint_path(run, 4))
    (checkpoint_path(run, 4) / "common.pt").write_bytes(b"PK")
    size = (checkpoint_path(run, 2) / "common.pt").stat().st_size
    rows = answer("list", run)["checkpoints"]
    assert [(row["step"], row["layout"], row["state"]) for row in rows] == [
        (2, "1 rank", "ok"),
        (4, "", f"common.pt has 2 of {size} bytes"),
    ]
    assert invoke("list", run).stdout.splitlines()[0].split() == ["step", "saved", "MiB", "layout", "state"]


def test_checkpoints_of_megatron_lm_are_listed_and_verified(run: Path, tmp_path: Path) -> None:
    saved = tmp_path / "megatron"
    for step in (2, 4):
        shutil.copytree(checkpoint_path(run, 2), saved / f"iter_{step:07d}")
        (saved / f"iter_{step:07d}" / MANIFEST).unlink()
    (saved / "latest_checkpointed_iteration.txt").write_text("4")
    (saved / "iter_0000002" / ".metadata").unlink()
    rows = answer("list", saved)["checkpoints"]
    assert [(row["step"], row["state"]) for row in rows] == [(2, ".metadata is missing"), (4, "ok")]
    assert invoke("verify", saved).stdout.startswith(f"{saved / 'iter_0000004'}: ")
    (file,) = (saved / "iter_0000004").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-100])
    done = CliRunner().invoke(main, ["checkpoint", "verify", str(saved)])
    assert done.exit_code == 1


@pytest.mark.parametrize("of_megatron", [False, True])
def test_old_checkpoints_are_removed_and_damaged_ones_do_not_count(run: Path, tmp_path: Path, of_megatron: bool) -> None:
    folder = tmp_path / "megatron" if of_megatron else run
    places = {step: folder / f"iter_{step:07d}" if of_megatron else checkpoint_path(run, step) for step in (2, 4, 6, 8)}
    for place in places.values():
        if not place.exists():
            shutil.copytree(checkpoint_path(run, 2), place)
        if of_megatron:
            (place / MANIFEST).unlink()
    if of_megatron:
        (folder / "latest_checkpointed_iteration.txt").write_text("8")
    (places[8] / ".metadata").unlink()
    assert answer("prune", folder, "--keep", 2, "--dry-run")["removed"] == [str(places[2])]
    assert places[2].is_dir()
    assert answer("prune", folder, "--keep", 1)["removed"] == [str(places[2]), str(places[4])]
    assert [step for step, place in places.items() if place.is_dir()] == [6, 8]
    if of_megatron:
        shutil.copytree(places[6], places[2])
        (folder / "latest_checkpointed_iteration.txt").write_text("2")
        assert answer("prune", folder, "--keep", 1)["removed"] == []  # it goes on from step 2
        shutil.rmtree(places[2])
    (places[6] / ".metadata").unlink()
    refused = CliRunner().invoke(main, ["checkpoint", "prune", str(folder), "--keep", "1"])
    assert refused.exit_code == 1
    assert places[6].is_dir()


def test_a_checkpoint_says_what_it_is_of(run: Path) -> None:
    found = answer("inspect", run)
    assert (found["step"], found["samples"], found["optimizer"]) == (2, 8, "plain")
    assert found["model"]["hidden_size"] == 32
    assert "swiglu" in found["features"]
    lines = invoke("inspect", run, "--step", 2).stdout.splitlines()
    assert lines[0].startswith(f"checkpoint  {checkpoint_path(run, 2)}, saved ")
    assert "  swiglu" in "\n".join(lines[lines.index("features") :])


def test_an_undamaged_checkpoint_is_verified(run: Path) -> None:
    files = list(checkpoint_path(run, 2).iterdir())
    done = invoke("verify", run)
    assert (done.exit_code, done.stdout.partition(" files, ")[0]) == (0, f"{checkpoint_path(run, 2)}: {len(files)}")


@pytest.mark.parametrize("name", ["common.pt", ".metadata", "metadata.json", "__0_0.distcp"])
def test_a_zeroed_file_is_named(run: Path, name: str) -> None:
    file = checkpoint_path(run, 2) / name
    file.write_bytes(bytes(file.stat().st_size))
    done = invoke("verify", run)
    assert done.exit_code == 1
    assert done.stderr.startswith(f"MS602 {checkpoint_path(run, 2)} is damaged\n  because: {name}")


def test_a_tensor_with_other_bytes_is_named_by_its_key(run: Path) -> None:
    file = checkpoint_path(run, 2) / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(byte ^ 255 for byte in content[middle : middle + 64])
    file.write_bytes(content)
    (reason,) = answer("verify", run)["problems"][0]["chain"]
    assert reason.startswith("__0_0.distcp: ")
    assert reason.endswith(
        ("has other bytes than were saved, in archive/data/0", "cannot be read: bad magic number for central directory")
    )


class Hostile:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("verb", ["verify", "list", "inspect", "diff"])
def test_no_verb_runs_what_an_index_names(run: Path, tmp_path: Path, verb: str) -> None:
    folder = checkpoint_path(run, 2)
    (folder / ".metadata").write_bytes(pickle.dumps(Hostile(tmp_path / "executed")))
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"][".metadata"] = (folder / ".metadata").stat().st_size
    (folder / MANIFEST).write_text(json.dumps(manifest))
    done = invoke(verb, run, *(CPU if verb == "diff" else ()))
    assert not (tmp_path / "executed").exists()
    if verb == "verify":
        assert done.stderr.splitlines()[1] == (
            "  because: .metadata cannot be read: the index refers to pathlib.Path.touch, which no torch checkpoint "
            "contains; it was not executed"
        )


def test_a_tensor_outside_the_checkpoint_is_not_read(run: Path) -> None:
    path = checkpoint_path(run, 2) / ".metadata"
    index = pickle.loads(path.read_bytes())
    for stored in index.storage_data.values():
        stored.relative_path = "../../job.yaml"
    path.write_bytes(pickle.dumps(index))
    (reason,) = damages(checkpoint_path(run, 2))
    assert reason == (
        ".metadata cannot be read: the index has a tensor in ../../job.yaml, which is not a file of the checkpoint"
    )


@pytest.mark.parametrize("content", ["5", "[1]", "null", '{"format": 1, "files": 3}', "[" * 100_000])
@pytest.mark.parametrize("name", [MANIFEST, "metadata.json"])
def test_one_bad_checkpoint_does_not_hide_the_good_ones(run: Path, name: str, content: str) -> None:
    shutil.copytree(checkpoint_path(run, 2), checkpoint_path(run, 4))
    (checkpoint_path(run, 4) / name).write_text(content)
    checkpoint_path(run, 6).touch()
    rows = answer("list", run)["checkpoints"]
    assert [(row["step"], row["state"] == "ok") for row in rows] == [(2, True), (4, False)]
    for verb in ("verify", "inspect"):
        done = invoke(verb, run)
        assert (done.exit_code, done.stderr.count("MS602")) == (1, 1)
        assert f"--resume {run} --step 2 --run {run}-2 continues from the previous checkpoint" in done.stderr


@pytest.mark.parametrize(
    ("given", "difference"),
    [
        (("--hidden-size", 64), "hidden_size is 32 in the checkpoint, but 64 in this job"),
        (("--normalization", "LayerNorm"), "normalization is RMSNorm in the checkpoint, but LayerNorm in this job"),
    ],
)
def test_a_job_with_another_model_is_refused_as_its_resume_is(run: Path, given: tuple[Any, ...], difference: str) -> None:
    done = invoke("diff", run, *CPU, *given)
    assert done.exit_code == 1
    assert done.stdout.splitlines()[:2] == [
        "MS602 the checkpoint and this job have different models",
        f"  because: {difference}",
    ]


def test_a_job_file_of_another_style_is_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("train: {style: gpt2}\n")
    found = answer("diff", run, *CPU, "-f", tmp_path / "job.yaml")
    assert "style is llama in the checkpoint, but gpt2 in this job" in found["problems"][0]["chain"]


def test_a_job_that_says_nothing_of_the_model_has_the_features_of_the_run(run: Path) -> None:
    done = invoke("diff", run, *CPU)
    assert (done.exit_code, done.stdout) == (0, "no difference\n")
