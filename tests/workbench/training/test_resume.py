"""What ``mindspeed pretrain --resume`` makes of a saved run and of what is given anew; no process is started."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from mindspeed.engine.resolution.request import Layer
from mindspeed.files.data_digest import content_digest
from mindspeed.problems import ResolutionError, RunError
from mindspeed.workbench.training.checkpoints import checkpoint_path
from mindspeed.workbench.training.data_source import open_data
from mindspeed.workbench.training.job import Job, write_job
from mindspeed.workbench.training.resume import comparable, of_new_class
from tests.workbench.training.conftest import MakeRun, job_of


def resumed(saved: Path, /, layer: Layer | None = None, world_size: int = 1, step: int | None = None, **train: Any) -> Job:
    return job_of(layer or Layer("command line"), train, world_size, resume=str(saved), step=step)


def refused(saved: Path, /, **train: Any) -> list[str]:
    with pytest.raises(ResolutionError) as caught:
        resumed(saved, **train)
    return [str(problem) for problem in caught.value.problems]


def features_of(job: Job) -> list[str]:
    return yaml.safe_load(job.request).get("features", [])


@pytest.mark.guards(42)
def test_a_size_that_overrides_a_setting_is_saved_in_one_spelling(make_run: MakeRun) -> None:
    """A job file with ``tensor-parallel.size`` and ``--tp`` above it."""
    run = make_run(Layer("job file", settings={"tensor-parallel": {"size": 2}}), world_size=2)
    first = resumed(run, Layer("command line", world={"tp": 1}))
    assert yaml.safe_load(first.request)["world"]["tp"] == 1
    assert "settings" not in yaml.safe_load(first.request)
    write_job(first)
    assert resumed(run).plan.world.tp == 1
    second = resumed(run, Layer("command line", settings={"tensor-parallel": {"size": 2}}), world_size=2)
    assert yaml.safe_load(second.request)["settings"] == {"tensor-parallel": {"size": 2}}
    assert "tp" not in yaml.safe_load(second.request)["world"]


def test_a_saved_job_with_both_spellings_of_a_size_is_resumed_with_that_of_the_world(make_run: MakeRun) -> None:
    run = make_run(Layer("job file", world={"tp": 1}))
    saved = yaml.safe_load((run / "job.yaml").read_text())
    saved["settings"] = {"tensor-parallel": {"size": 2}}
    (run / "job.yaml").write_text(yaml.safe_dump(saved))
    assert resumed(run).plan.world.tp == 1


def test_the_documented_line_resumes_on_another_layout(make_run: MakeRun) -> None:
    """``--nproc 2 --tp 1 --pp 2`` on a run over two tensor-parallel ranks."""
    features = ("tensor-parallel", "sequence-parallel")
    run = make_run(Layer("job file", features, {"tensor-parallel": {"size": 2}}), world_size=2)
    job = resumed(run, Layer("command line", world={"tp": 1, "pp": 2}), world_size=2)
    assert "sequence-parallel was skipped: it has no effect in this layout" in job.notes
    assert features_of(job) == ["tensor-parallel"]
    assert (job.plan.world.tp, job.plan.world.pp) == (1, 2)


def test_a_feature_that_is_named_anew_is_never_left_out(make_run: MakeRun) -> None:
    features = ("tensor-parallel", "sequence-parallel")
    run = make_run(Layer("job file", features, {"tensor-parallel": {"size": 2}}), world_size=2)
    with pytest.raises(ResolutionError) as caught:
        resumed(run, Layer("command line", ("sequence-parallel",), world={"tp": 1}))
    assert [problem.code for problem in caught.value.problems] == ["MS304"]


def test_more_steps_keep_the_schedule_of_the_run(make_run: MakeRun) -> None:
    run = make_run(Layer("job file"))
    job = resumed(run, train_iters=40)
    assert job.config.decay_iters == 20
    assert job.notes == ("the learning rate keeps its schedule, whose decay ends at step 20; --decay-iters 40 extends it",)
    write_job(job)
    assert resumed(run).config.decay_iters == 20
    assert resumed(run, train_iters=20).config.decay_iters == 20


def test_a_change_of_the_schedule_is_a_row(make_run: MakeRun) -> None:
    run = make_run(Layer("job file"), lr=1e-3)
    job = resumed(run, train_iters=40, decay_iters=40, lr=5e-4)
    assert job.notes == ("lr changed from 0.001 to 0.0005", "decay_iters changed from 20 to 40")


def test_the_same_steps_say_nothing_of_the_schedule(make_run: MakeRun) -> None:
    job = resumed(make_run(Layer("job file")))
    assert (job.config.decay_iters, job.notes) == (None, ())


def test_fewer_steps_than_the_checkpoint_has_are_a_problem(make_run: MakeRun) -> None:
    run = make_run(Layer("job file"))
    assert refused(run, train_iters=10) == [
        (
            "MS301 train.train_iters is 10, but the checkpoint was saved after step 20\n"
            f"  where: {checkpoint_path(run, 20)}\n"
            "  fix: --train-iters 40 (or any number greater than the checkpoint's step), or --step N for an earlier checkpoint"
        )
    ]


def test_a_job_file_that_was_cut_off_is_refused_with_the_fields_that_are_gone(make_run: MakeRun) -> None:
    run = make_run(Layer("job file", features=("async-ddp",), level=2), lr=0.001, seed=7)
    file, whole = run / "job.yaml", (run / "job.yaml").read_text()
    lines = whole.splitlines(keepends=True)
    for kept in range(lines.index("train:\n") + 1, len(lines)):
        file.write_text("".join(lines[:kept]))
        names = {line.partition(":")[0].strip() for line in lines[kept:]}
        (text,) = refused(run)
        told = text.splitlines()[0].partition(" was saved: ")[2].split(", ")
        assert {name.removeprefix("train.") for name in told} == names
        recorded = checkpoint_path(run, 20) / "job.yaml"
        assert text.splitlines()[-1] == f"  fix: cp {recorded} {file}"
        shutil.copy(recorded, file)
        assert resumed(run).request


def test_values_that_a_run_changed_before_it_was_stopped_stay_changed(make_run: MakeRun) -> None:
    run = make_run(Layer("job file"), lr=0.001)
    file = run / "job.yaml"
    file.write_text(file.read_text().replace("lr: 0.001", "lr: 0.002"))
    assert resumed(run).config.lr == 0.002


def test_an_older_checkpoint_is_chosen_by_its_step_and_continued_in_a_folder_of_its_own(make_run: MakeRun) -> None:
    run = make_run(Layer("job file"), steps=(10, 20))
    assert resumed(run).checkpoint == str(checkpoint_path(run, 20))
    assert refused(run, step=10) == [
        (
            f"MS602 {run} contains later checkpoints than step 10, of step 20, which would be replaced\n"
            f"  where: {run}\n"
            f"  fix: --resume {run} --step 10 --run {run}-10 continues in a separate folder"
        )
    ]
    job = resumed(run, step=10, run=f"{run}-10")
    assert (job.checkpoint, job.run) == (str(checkpoint_path(run, 10)), f"{run}-10")
    assert refused(run, step=15) == [
        f"MS602 the run {run} has no checkpoint of step 15, only of 10, 20\n  where: {run}\n  fix: --step 20"
    ]


def test_a_resumed_run_is_not_written_over_another_one(make_run: MakeRun, tmp_path: Path) -> None:
    run, other = make_run(Layer("job file")), tmp_path / "other"
    checkpoint_path(other, 5).mkdir(parents=True)
    assert refused(run, run=str(other)) == [
        (
            f"MS602 the folder {other} already contains a run with checkpoints\n"
            f"  where: {other}\n"
            f"  fix: --resume {other} continues that run; use another --run for a new one"
        )
    ]


def test_data_that_was_replaced_under_its_name_is_refused(make_run: MakeRun, tmp_path: Path, text: str) -> None:
    for end in (".bin", ".idx", ".json"):
        shutil.copy(text + end, tmp_path / f"own{end}")
    data = tmp_path / "own"
    run = make_run(Layer("API"), data=str(data))
    assert resumed(run).notes == ()
    content = bytearray(data.with_suffix(".bin").read_bytes())
    content[:2] = content[2:4]
    data.with_suffix(".bin").write_bytes(content)
    content_digest.cache_clear()
    assert refused(run) == [
        f"MS601 the data {data} has changed since the checkpoint of step 20 was written\n"
        f"  where: {data}.bin\n"
        "  fix: restore the file, or rename the new data and give the new name with --data PREFIX to read it from the beginning"
    ]
    assert resumed(run, data=text).data == text


def test_the_data_of_a_checkpoint_of_an_earlier_version_is_known_by_its_index(text: str) -> None:
    source = open_data(text, None)
    index, _, content = source.identity.rpartition(", ")
    assert source.is_that_of(source.identity)
    assert source.is_that_of(index)
    assert not source.is_that_of(f"{index}, {content[::-1]}")


@pytest.mark.parametrize("place", [0, 70_000, 5_000_000, -1])
def test_a_large_file_is_known_by_blocks_from_its_begin_to_its_end(tmp_path: Path, place: int) -> None:
    file = tmp_path / "data.bin"
    file.write_bytes(bytes(6_000_000))
    before = content_digest(file)
    with file.open("r+b") as changed:
        changed.seek(place, os.SEEK_SET if place >= 0 else os.SEEK_END)
        changed.write(b"x" * (100_000 if place > 0 else 1))
    content_digest.cache_clear()
    assert content_digest(file) != before


def test_making_the_job_of_a_resume_writes_nothing(make_run: MakeRun) -> None:
    run = make_run(Layer("job file"))
    (run / "result.json").write_text("{}")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    resumed(run, train_iters=40)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("place", ["/dev/null/x", "{file}", "{file}/below"])
def test_a_run_folder_that_cannot_be_made_is_one_problem(tmp_path: Path, text: str, place: str) -> None:
    file = tmp_path / "file"
    file.touch()
    run = place.format(file=file)
    with pytest.raises(ResolutionError) as caught:
        job_of(Layer("command line"), {"run": run, "data": text})
    (problem,) = caught.value.problems
    blocking = "/dev/null" if "null" in run else file
    assert str(problem) == (
        f"MS603 the run folder {run} cannot be used: {blocking} is not a folder\n"
        f"  where: {run}\n"
        "  fix: --run FOLDER with a writable folder"
    )


def test_a_run_folder_that_cannot_be_read_is_one_problem(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(path: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "checkpoints").mkdir()
    monkeypatch.setattr(Path, "iterdir", unreadable)
    with pytest.raises(ResolutionError) as caught:
        job_of(Layer("command line"), {"run": str(tmp_path), "data": text})
    assert [problem.message for problem in caught.value.problems] == [
        f"the run folder {tmp_path} cannot be used: Permission denied"
    ]


def test_the_written_job_names_what_a_process_needs(make_run: MakeRun) -> None:
    run = make_run(Layer("job file"))
    fields = json.loads((run / "process.json").read_text())
    assert set(fields) == {"config", "run", "data", "checkpoint", "request", "auto_resume"}


@pytest.mark.parametrize(
    ("saved", "asked", "world"),
    [
        ({"num_layers": 2, "tp": 2}, {"hybrid_layer_pattern": "*-*-"}, {"tp": 2}),
        ({"hybrid_layer_pattern": "*-|*-", "pp": 2}, {"hybrid_layer_pattern": ""}, {"pp": 2, "num_layers": 2}),
        ({"hybrid_layer_pattern": "*--"}, {"hybrid_layer_pattern": ""}, {}),
        ({"hybrid_layer_pattern": "*-|*-"}, {"hybrid_layer_pattern": "*-*-"}, {"hybrid_layer_pattern": "*-|*-"}),
        ({"num_layers": 2}, {"tp": 2}, {"num_layers": 2}),
    ],
    ids=["to hybrid", "to transformer", "to none", "hybrid", "transformer"],
)
def test_another_class_of_model_has_its_own_number_of_layers(
    saved: dict[str, Any], asked: dict[str, Any], world: dict[str, Any]
) -> None:
    assert of_new_class(Layer("resumed run", world=saved), [Layer("command line", world=asked)]).world == world


def test_a_transformer_and_a_hybrid_of_its_layers_are_one_model() -> None:
    transformer = {"num_layers": 2, "hidden_size": 32}
    hybrid = {"num_layers": 4, "hidden_size": 32, "layers": "*-*-"}
    there = "the checkpoint of a GPTModel is loaded into a HybridModel"
    assert comparable(transformer, hybrid) == (transformer, transformer, there)
    assert comparable(hybrid, transformer) == (
        transformer,
        transformer,
        "the checkpoint of a HybridModel is loaded into a GPTModel",
    )
    other = {"num_layers": 3, "layers": "*--"}
    assert comparable(transformer, other) == (transformer, other, there)
    assert comparable(hybrid, hybrid) == (hybrid, hybrid, "")


def test_facts_that_ranks_compare_are_options_data_and_step_but_no_path(make_run: MakeRun, text: str) -> None:
    job = resumed(make_run(Layer("job file")), lr=0.02)
    facts = job.facts()
    assert (facts["training lr"], facts["training step"], facts["training save_interval"]) == ("0.02", "20", "null")
    assert facts["data 0"].startswith(f"{Path(text + '.bin').stat().st_size} bytes, ")
    assert not [value for value in facts.values() if os.sep in value]
    assert {"training save_interval", "training step"}.isdisjoint(job.locked_facts())


def test_a_run_folder_in_object_storage_is_refused(text: str) -> None:
    with pytest.raises(ResolutionError) as caught:
        job_of(Layer("command line", world={"num_layers": 2}), {"data": text, "run": "s3://bucket/job"})
    assert str(caught.value).startswith(
        "MS603 the run folder s3://bucket/job is not in a file system, and mindspeed pretrain does not write to object storage"
    )


def test_several_data_sets_are_refused_with_the_way_to_mix_them() -> None:
    with pytest.raises(RunError) as caught:
        open_data("0.3 a 0.7 b", None)
    assert str(caught.value) == (
        "MS601 the data '0.3 a 0.7 b' names 4 words, but mindspeed pretrain reads one indexed data set\n"
        "  fix: give one prefix; mindspeed run with Megatron-LM's script mixes several by weight (--data-path)"
    )


def test_a_range_of_processes_is_that_of_an_elastic_job(make_run: MakeRun) -> None:
    elastic = Layer("job file", world={"world_size": "1-2"})
    run = make_run(elastic, world_size=2)
    assert resumed(run, world_size=1).plan.world.known()["world_size"] == 1
    with pytest.raises(ResolutionError) as caught:
        resumed(run, layer=elastic, world_size=4)
    assert str(caught.value).startswith(
        "MS306 job file allows 1 to 2 processes, but the job of this process has 4 ranks\n  where: WORLD_SIZE"
    )
