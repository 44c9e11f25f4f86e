"""``mindspeed compare``: finished runs, a job without and with its features, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from mindspeed import registry
from mindspeed.engine.resolution.request import Layer
from mindspeed.problems import RunError
from mindspeed.workbench.training.reporting import Reporter
from mindspeed.workbench.training.variants import ComparedJob, Variant, pretrain_job, removable, train, variants
from tests.megatron_lm import checkout
from tests.page_structure import PageStructure

SIZES = {"world_size": 2, "num_experts": 0, "seq_length": 64, "num_attention_heads": 4}


def finished_run(folder: Path, losses: Sequence[float], features: Sequence[str], peak: float, **options: Any) -> Path:
    """Write the folder of a finished run, by the writers of a run; each step takes half a second."""
    folder.mkdir()
    reporter = Reporter(folder, first=0, last=len(losses), tokens=64, interval=100)
    for step, loss in enumerate(losses, 1):
        numbers = {"costs.peak_mib": peak, "costs.communicated_mib": 2.0}
        reporter.step(step, loss, 0.001, None, 0.5 if "swiglu" in features else 1.0, numbers)
    reporter.close({"heldout_loss": losses[-1]})
    plan = registry.resolve([Layer("test", features=tuple(features), world=SIZES, platform="cpu", only=True)])
    registry.write_plan(plan, folder / "plan.json")
    (folder / "process.json").write_text(json.dumps({"config": {"lr": 0.001, "run": str(folder)} | options}))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Return the folders of two runs, the second with a feature."""
    first = finished_run(tmp_path / "a", [5.0, 4.0, 3.0, 2.5], [], 100.0)
    return first, finished_run(tmp_path / "b", [5.0, 4.0, 3.5, 2.5], ["swiglu"], 75.0)


def cells(done: Result) -> list[list[str]]:
    return [[cell for cell in line.split("  ") if cell] for line in done.stdout.splitlines()]


def test_two_finished_runs_are_one_table_and_one_page(mindspeed: Any, runs: tuple[Path, Path], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = mindspeed("compare", *runs, "--html", page)
    assert (done.exit_code, done.stderr) == (0, "")
    first, second = ([cell.strip() for cell in row] for row in cells(done)[1:3])
    assert first == [str(runs[0]), "4", "5.0000", "2.5000", "-", "1", "100.0 MiB", "2.00 MiB"]
    assert second == [str(runs[1]), "4", "5.0000", "2.5000", "5.0e-01", "0.5 (-50%)", "75.0 MiB (-25%)", "2.00 MiB (+0%)"]
    assert f"features of {runs[1]} only: swiglu" in done.stdout
    text = page.read_text("utf-8")
    structure = PageStructure(text)
    assert structure.sections == ["Runs", "Effects", f"{runs[0]}, {runs[1]}", "Losses side by side"]
    assert structure.figures["Loss"][-2:] == list(map(str, runs))
    assert f"{runs[1]}  -25.0" in structure.figures["Peak memory"]
    assert "Communication" not in structure.figures
    assert "<tr><td>3</td><td>3.000000</td><td>3.500000</td></tr>" in text
    assert (structure.loaded, structure.tags & {"script", "link"}, structure.has_dark_scheme) == ([], set(), True)


def test_the_report_of_a_finished_run_is_written_again_over_a_baseline(mindspeed: Any, runs: tuple[Path, Path]) -> None:
    done = mindspeed("report", runs[1], "--baseline", runs[0])
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == f"page: {runs[1] / 'report.html'}"
    structure = PageStructure((runs[1] / "report.html").read_text("utf-8"))
    assert structure.figures["Loss"][-2:] == list(map(str, runs))
    told = json.loads(mindspeed("report", runs[0], "--html", runs[0] / "other.html", "--json").stdout)
    assert (told["page"], told["steps"], told["against"]) == (str(runs[0] / "other.html"), 4, None)
    assert (runs[0] / "other.html").is_file()


def test_a_folder_that_is_no_run_has_no_report(mindspeed: Any, tmp_path: Path) -> None:
    done = mindspeed("report", tmp_path)
    assert done.exit_code == 1
    fix = "give the folder of a run of mindspeed pretrain, mindspeed compare, or Megatron-LM with a feature that logs steps"
    assert done.stderr.endswith(f"  fix: {fix}\n")
    assert not (tmp_path / "report.html").exists()


def test_the_numbers_are_json_as_well(mindspeed: Any, runs: tuple[Path, Path]) -> None:
    told = json.loads(mindspeed("compare", *runs, "--json").stdout)
    first, second = told["runs"]
    assert (first["against"], second["against"]) == (None, str(runs[0]))
    assert (second["seconds"], second["peak_mib"], second["communicated_mib"], second["largest_difference"]) == (
        0.5,
        75,
        2,
        0.5,
    )
    assert second["losses"] == {"1": 5.0, "2": 4.0, "3": 3.5, "4": 2.5}
    assert told["notes"] == [f"features of {runs[1]} only: swiglu"]


def test_other_data_and_another_length_are_said(mindspeed: Any, runs: tuple[Path, Path], tmp_path: Path) -> None:
    short = finished_run(tmp_path / "short", [5.0, 4.0], [], 100.0, data="other")
    told = json.loads(mindspeed("compare", runs[0], short, "--json").stdout)
    assert told["notes"] == [
        f"{runs[0]} has 4 steps and {short} has 2; the 2 common steps are compared",
        f"option data is None in {runs[0]}, but other in {short}",
    ]
    (short / "plan.json").unlink()
    *_, note = json.loads(mindspeed("compare", runs[0], short, "--json").stdout)["notes"]
    assert note == f"features, data and options are not compared, because there is no plan.json in {short}"


def test_a_folder_without_a_log_or_without_a_loss_is_refused(mindspeed: Any, runs: tuple[Path, Path], tmp_path: Path) -> None:
    done = mindspeed("compare", runs[0], tmp_path)
    assert done.exit_code == 1
    assert done.stderr.startswith(f"MS602 {tmp_path} is not the folder of a run: log.jsonl cannot be read: No such file")
    (tmp_path / "log.jsonl").write_text('{"step": 1, "heldout_loss": 3.0}\n')
    assert "its log.jsonl has no step with a loss" in mindspeed("compare", runs[0], tmp_path).stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["runs/a"], "give the folders of at least two finished runs, or a job, but not both"),
        (["a", "b", "--", "pretrain_gpt.py"], "give the folders of at least two finished runs, or a job, but not both"),
        ([], "give a job with -f or --features, a command after --, or the folders of finished runs"),
        (
            ["--features", "swiglu", "--", "mindspeed", "pretrain"],
            "give --nproc and the options of the job after mindspeed pretrain",
        ),
        (["--", "mindspeed", "run", "a.py"], "after -- give a training script, or mindspeed pretrain with its options"),
    ],
)
def test_what_is_no_job_is_a_wrong_usage(mindspeed: Any, words: list[str], text: str) -> None:
    done = mindspeed("compare", *words)
    assert done.exit_code == 2
    assert text in done.stderr


def test_a_job_does_not_start_inside_another_one(mindspeed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = mindspeed("compare", "--features", "swiglu")
    assert "mindspeed compare starts its runs itself; call it outside of torchrun and Slurm" in done.stderr


def test_features_of_level_0_and_owners_of_a_size_stay() -> None:
    world = {**SIZES, "cp": 2, "hidden_size": 64, "num_layers": 2}
    layer = Layer("test", features=("ring-attention", "step-log"), world=world, platform="cpu", only=True)
    assert removable(registry.resolve([layer])) == ("ring-attention",)


@pytest.mark.long
def test_those_that_require_a_disabled_feature_leave_with_it_and_what_the_job_needs_is_a_problem() -> None:
    sizes = ["--world-size", "2", "--cp", "2", "--platform", "cpu", "--only", "--seq-length", "64", "--num-experts", "0"]
    check = ("check", *sizes, "--num-attention-heads", "4", "--features", "ring-attention-update,ring-attention", "--json")
    job = ComparedJob(check, lambda told: told["commands"][0]["plan"], lambda folder: (), is_script=False)
    without, whole, *each = variants(job, leave_one_out=True)
    assert isinstance(without, RunError)
    (problem,) = without.problems
    assert problem.message.startswith("the job without features: context-parallel needs a feature for context-parallel")
    assert problem.fix_text == "give the folders of two finished runs instead: mindspeed compare RUN RUN"
    assert whole == Variant("with features")
    assert isinstance(each[0], RunError)
    assert each[1:] == [Variant("without ring-attention-update", ("ring-attention-update",), ("ring-attention-update",))]


def test_a_run_that_fails_is_a_problem_with_its_reason(tmp_path: Path) -> None:
    failing = pretrain_job(())
    failing = ComparedJob(failing.check, failing.plan_in, lambda folder: ("features", "check", "no-such-feature"), True)
    with pytest.raises(RunError) as failed:
        train(failing, Variant("with features"), tmp_path / "run")
    (problem,) = failed.value.problems
    assert (problem.code, problem.message) == ("MS604", "the run with features ended with exit status 1")
    assert problem.chain[0].startswith("MS201 the feature 'no-such-feature' does not exist")


def names(told: Mapping[str, Any]) -> list[str]:
    return [run["name"] for run in told["runs"]]


@pytest.mark.long
def test_a_job_is_trained_without_and_with_its_features_and_without_each(mindspeed: Any, tmp_path: Path) -> None:
    world = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 32}
    batches = {"micro_batch_size": 1, "global_batch_size": 2}
    job = {"features": ["chunked-loss", "swiglu"], "only": True, "world": world | batches, "platform": "cpu"}
    train_section = {"train_iters": 4, "warmup_iters": 1, "sample_tokens": 0, "eval_iters": 1}
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(job | {"train": train_section}))
    done = mindspeed("compare", "-f", file, "--nproc", "2", "--leave-one-out", "--output", tmp_path / "out", "--json")
    told = json.loads(done.stdout)
    assert (done.exit_code, told["problems"]) == (0, [])
    assert names(told) == ["without features", "with features", "without chunked-loss", "without swiglu"]
    assert [run["against"] for run in told["runs"]] == [None, "without features", "with features", "with features"]
    assert all(run["steps"] == 4 and run["peak_mib"] > 0 and run["communicated_mib"] > 0 for run in told["runs"])
    assert all(run["largest_difference"] < 1e-5 for run in told["runs"][1:])
    assert told["notes"] == ["disabled in the run without features: chunked-loss, swiglu"]
    assert (tmp_path / "out" / "compare.html").is_file()


@pytest.mark.long
def test_a_stock_command_of_megatron_lm_is_compared(mindspeed: Any, tmp_path: Path) -> None:
    started = checkout.Checkout(tmp_path)
    script = [started.root / "pretrain_gpt.py", *started.flags, *checkout.LLAMA, "--train-iters", "4"]
    options = ["--platform", "cpu", "--only", "--features", "swiglu", "--nproc", "2", "--output", tmp_path / "out", "--json"]
    done = mindspeed("compare", *options, "--", *script)
    told = json.loads(done.stdout)
    assert (done.exit_code, told["problems"]) == (0, [])
    assert names(told) == ["without features", "with features"]
    assert [run["steps"] for run in told["runs"]] == [4, 4]
    assert told["runs"][1]["largest_difference"] < 1e-5
    assert all(run["communicated_mib"] > 0 for run in told["runs"])
