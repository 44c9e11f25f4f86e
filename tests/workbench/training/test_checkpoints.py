import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from mindspeed.problems import RunError
from mindspeed.workbench.training.checkpoints import (
    MANIFEST,
    Manifest,
    check_manifest,
    checkpoint_path,
    find_checkpoint,
    partial_path,
    read_manifest,
    remove_old,
    saved_steps,
)

MODEL = {"hidden_size": 64, "style": "llama"}
SAVED = Manifest(5, 40, MODEL, "plain", "bytes", {"tp": 2}, "abc")
WRONG: dict[str, Any] = {"format": 1, **asdict(SAVED)}
"""A manifest that is right; each test spoils one value."""


@pytest.fixture
def run(tmp_path):
    """A run folder with the checkpoints of steps 5 and 10, and one that was interrupted."""
    for step in (5, 10):
        path = checkpoint_path(tmp_path, step)
        path.mkdir(parents=True)
        replace(SAVED, step=step).write(path)
        for name in ("metadata.json", "common.pt", ".metadata"):
            (path / name).touch()
    partial_path(checkpoint_path(tmp_path, 15)).mkdir()
    return tmp_path


def test_only_complete_checkpoints_count(run):
    assert saved_steps(run) == [5, 10]
    assert find_checkpoint(run).name == "step-00000010"


def test_old_and_interrupted_checkpoints_are_removed(run):
    remove_old(run, keep=1)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000010"]


def test_a_manifest_survives_the_folder(run):
    assert read_manifest(checkpoint_path(run, 5)) == SAVED


@pytest.mark.parametrize(("name", "what"), [("none", "does not exist"), (".", "has no complete checkpoint")])
def test_a_run_without_a_checkpoint_cannot_be_continued(tmp_path, name, what):
    run = tmp_path / name
    with pytest.raises(RunError) as caught:
        find_checkpoint(run)
    assert str(caught.value) == f"MS602 the run {run} {what}\n  where: {run}\n  fix: start it without --resume"


def test_a_checkpoint_with_missing_files_is_named(run):
    path = checkpoint_path(run, 10)
    (path / "common.pt").unlink()
    with pytest.raises(RunError) as caught:
        read_manifest(path)
    assert str(caught.value) == (
        f"MS602 {path} is damaged\n"
        "  because: common.pt is missing\n"
        f"  where: {path}\n"
        f"  fix: --resume {run} --step 5 --run {run}-5 continues from the previous checkpoint"
    )


def test_a_checkpoint_of_a_megatron_that_writes_no_common_file_is_complete_without_it(run):
    path = checkpoint_path(run, 10)
    (path / "common.pt").unlink()
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    assert read_manifest(path).step == 10
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "common_backend": "torch"}')
    with pytest.raises(RunError):
        read_manifest(path)


def test_a_file_that_was_cut_is_named_with_its_sizes(run):
    path = checkpoint_path(run, 5)
    replace(SAVED, files={"common.pt": 7}).write(path)
    with pytest.raises(RunError) as caught:
        read_manifest(path)
    assert str(caught.value) == (
        f"MS602 {path} is damaged\n"
        "  because: common.pt has 0 of 7 bytes\n"
        f"  where: {path}\n"
        "  fix: copy it again from its source, or start a new run"
    )


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "mindspeed.json is missing"),
        ("{", "mindspeed.json cannot be read: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        (
            json.dumps({"format": 9}),
            ("mindspeed.json cannot be read: its format is not 1; a newer mindspeed may be able to read it"),
        ),
        ("[]", "mindspeed.json cannot be read: the file does not contain a JSON object"),
        (WRONG | {"step": "5"}, "mindspeed.json cannot be read: step: Input should be a valid integer"),
        (WRONG | {"samples": -1}, "mindspeed.json cannot be read: samples: Input should be greater than or equal to 0"),
        (WRONG | {"layout": [2]}, "mindspeed.json cannot be read: layout: Input should be an object"),
        (
            WRONG | {"files": {"common.pt": None}},
            "mindspeed.json cannot be read: files.common.pt: Input should be a valid integer",
        ),
        (WRONG | {"more": 1}, "mindspeed.json cannot be read: more: Unexpected keyword argument"),
    ],
)
def test_a_foreign_folder_is_not_a_checkpoint(run, content, why):
    path = checkpoint_path(run, 5)
    (path / MANIFEST).unlink()
    if content is not None:
        (path / MANIFEST).write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(RunError) as caught:
        read_manifest(path)
    assert str(caught.value) == f"MS602 {path} is not a checkpoint of mindspeed pretrain: {why}\n  where: {path}"


@pytest.mark.guards(40, 42)
def test_a_checkpoint_of_another_model_names_every_difference():
    problems = check_manifest(SAVED, {"hidden_size": 128, "style": "llama", "num_layers": 2}, "distributed", "somewhere")
    assert [str(problem) for problem in problems] == [
        (
            "MS602 the checkpoint and this job have different models\n"
            "  because: hidden_size is 64 in the checkpoint, but 128 in this job\n"
            "  because: num_layers is None in the checkpoint, but 2 in this job\n"
            "  where: somewhere\n"
            "  fix: give this job the model options that the checkpoint was saved with, such as --hidden-size, or start a new "
            "run"
        ),
        (
            "MS602 the checkpoint contains the state of a plain optimizer, but this job uses a distributed one\n"
            "  where: somewhere\n"
            "  fix: use the same kind of optimizer, sharded or not, as when the checkpoint was saved"
        ),
    ]


def test_another_layout_is_no_difference():
    assert check_manifest(replace(SAVED, layout={"pp": 2}), MODEL, "plain", "somewhere") == []
