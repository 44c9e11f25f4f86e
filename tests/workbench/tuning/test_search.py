"""The search ranks, its predictions obey laws, and what cannot be is a problem with a fix."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from mindspeed import registry
from mindspeed.cli import main
from mindspeed.engine.resolution.environment import made_up
from mindspeed.engine.resolution.request import Layer
from mindspeed.job.world import FIELDS
from mindspeed.memory_planner.layouts import LayoutPeaks
from mindspeed.memory_planner.plans import peak_of
from mindspeed.workbench.tuning import time as timing
from mindspeed.workbench.tuning.job import SearchJob, make_search
from mindspeed.workbench.tuning.layout_jobs import FixedRequest
from mindspeed.workbench.tuning.measure import Measurement, Store, machine_facts, telling
from mindspeed.workbench.tuning.products import keep
from mindspeed.workbench.tuning.search import Found, Question, Resolved, key_of, search
from mindspeed.workbench.tuning.space import SIZES, Choice, Layouts
from tests.features.resolving import CATALOG
from tests.workbench.tuning.test_layout_jobs import OF_PLATFORM, everywhere, space

SMALL = ("--dtype", "bf16", "--pp", "1", "--micro-batch-size", "1")
MACHINE = timing.Machine(timing.DEFAULTS["cpu"])


def found(layouts: Layouts, tried: list[Choice], top: int = 5, **question: Any) -> Found:
    asked = Question(layouts, tried, FixedRequest(), question.pop("machine", MACHINE), **question)
    return search(asked, CATALOG, everywhere, lambda choice, world: Resolved(), top)


def test_rows_come_by_predicted_time_and_those_that_do_not_fit_are_dropped() -> None:
    layouts, tried = space()
    every, some, none = (found(layouts, tried[:20], 50, device_bytes=limit).rows for limit in (np.inf, 1.6e6, 1.0))
    for rows in (every, some, none):
        seconds = [row.predicted_seconds for row in rows]
        assert seconds == sorted(seconds)
        assert len({row.key for row in rows}) == len(rows)
    assert all(row.fits for row in some)
    assert any(row.predicted_bytes > 1.6e6 for row in every)
    assert none
    assert not any(row.fits for row in none)


def test_the_ranking_does_not_change_with_the_speed_of_the_machine() -> None:
    layouts, tried = space()
    slower = timing.Machine({kind: 3 * seconds for kind, seconds in MACHINE.seconds.items()})
    one, three = (found(layouts, tried[:20], 30, machine=machine).rows for machine in (MACHINE, slower))
    assert [row.key for row in one] == [row.key for row in three]
    assert three[0].predicted_seconds == pytest.approx(3 * one[0].predicted_seconds)


def test_more_tensor_parallel_ranks_never_hold_more_bytes() -> None:
    layouts, _ = space()
    columns, rows = layouts.columns, np.flatnonzero(layouts.divides & layouts.whole_batches & (layouts.pp == 1))
    held = LayoutPeaks(CATALOG, layouts.model, columns).of(rows, {}, {})
    for row in rows:
        same = np.logical_and.reduce([columns[name][rows] == columns[name][row] for name in SIZES if name != "tp"])
        assert (np.diff(held[same][np.argsort(columns["tp"][rows][same])]) <= 0).all()


ONE_ANSWER = """
    --platform npu --megatron 0.16.1 --num-layers 8 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32
    --num-query-groups 32 --num-experts 0 --vocab-size 32000 --seq-length 2048 --micro-batch-size 1 --global-batch-size 64
    --normalization RMSNorm --gated-linear-unit --rotary --dtype bf16 --tp 2 --pp 1 --cp 1 --features swap-optimizer
    --device-memory 8GiB
"""


@pytest.mark.parametrize("top", ["5", pytest.param("0", marks=pytest.mark.long)])
def test_a_search_and_its_rows_agree_on_what_fits_and_is_modelled(top: str, tmp_path: Path) -> None:
    status, data = run("--world-size", "8", *ONE_ANSWER.split(), "--top", top, "--store", str(tmp_path))
    assert status == 0
    assert all(row["fits"] for row in data["rows"])
    assert (data["feasible"], data["fitting"]) == (360, 360)
    assert data["not_modelled"] == []
    assert "swap-optimizer" in data["not_timed"]


def test_a_search_names_features_whose_memory_it_counts_and_whose_time_it_does_not(tmp_path: Path) -> None:
    words = ("--world-size", "8", *ONE_ANSWER.split(), "--top", "1", "--store", str(tmp_path))
    *_, last = CliRunner().invoke(main, ["tune", *words]).stdout.splitlines()
    assert last == (
        "memory modelled, step time not: adaptive-cp, hybrid-attention, kv-allgather-cp, ring-attention, swap-optimizer, "
        "ulysses-attention"
    )


def test_a_fit_gives_back_the_machine_that_made_the_times() -> None:
    layouts, tried = space()
    rows = telling(found(layouts, tried, 400).rows, 24, MACHINE)
    factors = {kind: 1 + number % 4 for number, kind in enumerate(MACHINE.seconds)}
    true = timing.Machine({kind: seconds * factors[kind] for kind, seconds in MACHINE.seconds.items()})
    seconds = [float(timing.step_seconds(row.work, true)) for row in rows]
    fitted = timing.fit([dict(row.work) for row in rows], seconds, MACHINE)
    again = [float(timing.step_seconds(row.work, fitted)) for row in rows]
    assert again == pytest.approx(seconds, rel=0.07)  # the prior still pulls a little


def test_a_store_keeps_what_was_measured_and_knows_another_machine(tmp_path: Path) -> None:
    store = Store(tmp_path, {"torch": "1"}, {"num_layers": 2})
    store.put(Measurement("a", 1.5, {"step": 1.0}, 3))
    assert store.measurements() == {"a": Measurement("a", 1.5, {"step": 1.0}, 3)}
    assert store.staleness() is None
    other = Store(tmp_path, {"torch": "2"}, {"num_layers": 2})
    assert other.measurements() == {}
    problem = other.staleness()
    assert problem is not None
    assert "torch is 2, was 1" in problem.message


def test_a_store_that_cannot_be_written_is_reported_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for name in ("tuning.products.measured_products", "tuning.measure.run_job"):
        monkeypatch.setattr(f"mindspeed.workbench.{name}", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    for words in (("--measure-products",), ("--calibrate", "1")):
        result = CliRunner().invoke(
            main, ["tune", "--world-size", "2", "--platform", "cpu", *SMALL, *words, "--store", str(tmp_path / "file" / "x")]
        )
        assert result.exit_code == 3
        assert "cannot be written: a part of its path is a file\n  fix: --store FOLDER with a writable folder" in result.output


def test_folders_without_measurements_and_damaged_files_are_not_those_of_another_machine(tmp_path: Path) -> None:
    one, two, empty = (Store(tmp_path, {"torch": version}, {}) for version in "123")
    one.put(Measurement("a", 1.5, {"step": 1.0}, 3))
    keep(two, "bf16", {"flops": 1e-12, "moved": 1e-12})
    assert two.staleness() is not None  # its products are no measured steps
    assert one.staleness() is None
    two.put(Measurement("a", 1.5, {"step": 1.0}, 3))
    for file in (one.machine / "machine", two.file_of("a")):
        file.write_text(file.read_text()[:9])
    assert empty.staleness() is None


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 0, -1, "1", None])
def test_a_measurement_without_seconds_is_damaged(seconds: Any, tmp_path: Path) -> None:
    store = Store(tmp_path, {}, {})
    store.put(Measurement("a", seconds, {"step": 1.0}, 3))
    assert store.measurements() == {}


def run(*words: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(main, ["tune", "--world-size", "2", "--json", *words])
    return result.exit_code, json.loads(result.stdout)


def test_json_has_rows_with_job_files(tmp_path: Path) -> None:
    status, data = run("--top", "2", "--store", str(tmp_path / "store"), "--output", str(tmp_path))
    assert status == 0
    assert {"configurations", "feasible", "search_seconds", "rows"} <= data.keys()
    (row, _) = data["rows"]
    assert row.keys() == {"predicted_seconds", "predicted_bytes", "fits", "measured_seconds", "job"}
    assert row["job"]["world"].keys() >= set(SIZES)
    assert (tmp_path / "job.yaml").is_file()
    assert json.loads((tmp_path / "tune.json").read_text())["rows"] == data["rows"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ("--tp", "3"),
            r"no valid configuration \(layout and features\) has tp=3, but \d+ valid configurations have another tp, fix: "
            r"remove --tp",
        ),
        (
            ("--num-layers", "3", "--pp", "2"),
            r"no valid configuration \(layout and features\) has pp=2, but \d+ valid configurations have another pp, fix: "
            r"remove --pp",
        ),
        (
            ("--world-size", "7"),
            r"data-parallel: global batch size 8 is not divisible by micro batch size x dp = 1 x 7, fix: "
            r"--global-batch-size 14 \(a multiple of 1 x 7\)",
        ),
        (
            ("--calibrate", "90", "--tp", "2", "--micro-batch-size", "1"),
            r"--calibrate 90 needs 90 different configurations \(layout and features\) of 2 ranks, but only (\d+) are valid "
            r"and fit in device memory, fix: --calibrate \d+, or a larger --world-size",
        ),
        (("--try", "ring-atention"), r"the feature 'ring-atention' does not exist, fix: did you mean ring-attention .*\?"),
        (("ring-atention",), r"the feature 'ring-atention' does not exist, fix: did you mean ring-attention .*\?"),
        (("--dtype", "fp8"), "dtype is 'fp8', which is not one of fp32, bf16, fp16, fix: --dtype fp32"),
        (("--dtype", "fp8", "--measure-products"), "dtype is 'fp8', which is not one of fp32, bf16, fp16, fix: --dtype fp32"),
        (
            ("--world-size", "-4"),
            r"world_size is -4, which is less than 1 \(number of processes\), fix: --world-size 1 or more",
        ),
    ],
)
def test_what_cannot_be_is_a_problem_with_a_fix(words: tuple[str, ...], text: str, tmp_path: Path) -> None:
    status, data = run(*words, "--store", str(tmp_path))
    (problem,) = data["problems"]
    assert status == 1
    assert re.fullmatch(text, f"{problem['message']}, fix: {problem['fix']}")


def test_unknown_names_have_their_source_and_a_fix_wherever_they_are_given(tmp_path: Path) -> None:
    _, requested = run("nosuch", "--store", str(tmp_path))
    _, tried = run("--try", "nosuch", "--store", str(tmp_path))
    assert requested == tried
    assert requested["problems"][0]["where"] == "command line"
    assert requested["problems"][0]["fix"] == "mindspeed features list shows every name"


@pytest.mark.parametrize(
    "words",
    [
        ("--steps", "0"),
        ("--calibrate", "-1"),
        ("--top", "-1"),
        ("--budget-seconds", "-5"),
        ("--budget-seconds", "nan"),
    ],
)
def test_a_number_outside_of_its_range_is_refused(words: tuple[str, str]) -> None:
    result = CliRunner().invoke(main, ["tune", "--world-size", "2", *words])
    assert result.exit_code == 2
    assert f"{words[1]} is not in the range x>=" in result.output.replace("-5.0", "-5")


def test_only_so_many_measured_rows_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(rows: Any, *_: Any) -> dict[str, Measurement]:
        return {row.key: Measurement(row.key, 1.0 + row.predicted_bytes, row.work, 1) for row in rows}

    def few(job: SearchJob, machine: timing.Machine, limit: float, top: int, count: Any) -> Found:
        assert top == 0
        return searched(job, machine, limit, 4, count)

    searched = SearchJob.search
    monkeypatch.setattr(SearchJob, "search", few)
    monkeypatch.setattr("mindspeed.workbench.tuning.measure.measure", measured)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    status, data = run(*SMALL, "--mode", "black", "--top", "2", "--store", str(tmp_path))
    assert status == 0
    one, two = data["rows"]
    assert one["measured_seconds"] <= two["measured_seconds"]


@pytest.mark.parametrize("words", [("--tp", "2"), ("--world-size", "4", "--num-layers", "8"), ("--try", "ring-attention")])
def test_what_can_be_has_rows(words: tuple[str, ...], tmp_path: Path) -> None:
    status, data = run(*words, "--top", "1", "--store", str(tmp_path))
    assert status == 0
    assert len(data["rows"]) == 1


MIXED = ("--num-experts", "4", "--moe-layers", "2", *SMALL, "--top", "1")


def test_a_model_of_dense_and_moe_layers_is_searched_but_not_built(tmp_path: Path) -> None:
    store = ("--store", str(tmp_path / "store"))
    seconds = {}
    for layers in ("0", "2", "4"):
        status, data = run(*MIXED, *store, "--moe-layers", layers)
        assert status == 0
        seconds[layers] = data["rows"][0]["predicted_seconds"], data["rows"][0]["predicted_bytes"]
    assert seconds["0"] < seconds["2"] < seconds["4"]
    for words in (("--output", str(tmp_path / "out")), ("--calibrate", "1"), ("--mode", "mixed"), ("--dry-run",)):
        status, data = run(*MIXED, *store, *words)
        assert status == 1
        assert data["problems"][0]["message"] == "moe_layers is 2, but mindspeed pretrain does not build such a model"
    status, data = run(*MIXED, *store, "--moe-layers", "0", "--dry-run")
    assert (status, data["problems"][0]["message"][:15]) == (1, "moe_layers is 0")


def test_what_every_layout_has_wrong_is_reported(tmp_path: Path) -> None:
    status, data = run(*MIXED, "--moe-layers", "9", "--store", str(tmp_path))
    (problem,) = data["problems"]
    assert (status, problem["code"], problem["message"]) == (1, "MS302", "moe_layers is 9, but the model has 4 layers")


def test_nothing_fits_says_what_is_missing_and_what_saves_most(tmp_path: Path) -> None:
    status, data = run("--device-memory", "1MiB", *SMALL, "--store", str(tmp_path))
    (problem,) = data["problems"]
    found = re.fullmatch(
        r"none of (\d+) configurations fits: the smallest needs ([\d,]+) bytes, ([\d,]+) too many \((.*)\)",
        problem["message"],
    )
    assert status == 1
    assert found is not None
    needed, excess = (int(found[number].replace(",", "")) for number in (2, 3))
    assert needed - excess == 2**20
    assert re.match(r"--try [a-z0-9-]+, which saves [\d,]+ bytes of it, ", problem["fix"])
    _, data = run("--device-memory", f"{needed}B", *SMALL, "--store", str(tmp_path), "--top", "1")
    assert data["rows"][0]["fits"]
    assert data["rows"][0]["predicted_bytes"] <= needed


def test_bytes_of_a_row_are_those_of_the_memory_planner(tmp_path: Path) -> None:
    _, data = run("--top", "1", "--store", str(tmp_path))
    (row,) = data["rows"]
    model = make_search([Layer("test")], {}, made_up("cpu", "0.16.1"), 2).model
    world = {name: value for name, value in model.items() if name in FIELDS and name not in OF_PLATFORM} | row["job"]["world"]
    plan = registry.plan(row["job"]["features"], world=world, platform="cpu")
    assert row["predicted_bytes"] == peak_of(plan, registry.catalog())


def test_a_stale_store_is_refused_until_it_is_measured_again(tmp_path: Path) -> None:
    Store(tmp_path, {"torch": "1"}, {}).put(Measurement("a", 1.5, {"step": 1.0}, 3))
    status, data = run("--store", str(tmp_path))
    (problem,) = data["problems"]
    now = machine_facts("cpu")
    different = "; ".join(f"{name} is {value}, was {'1' if name == 'torch' else None}" for name, value in now.items())
    assert (status, problem["code"], problem["fix"]) == (
        1,
        "MS346",
        "measure again with mindspeed tune --calibrate N (up to N configurations), or give another folder with --store",
    )
    assert problem["message"] == f"the measurements in {tmp_path} are from another machine or version: {different}"
    Store(tmp_path, now, {}).put(Measurement("a", 1.5, {"step": 1.0}, 3))
    assert Store(tmp_path, now, {}).staleness() is None


def test_more_ranks_than_cores_are_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    status, data = run("--calibrate", "1", "--num-layers", "1", "--store", str(tmp_path))
    assert status == 1
    assert data["problems"][0]["message"] == ("2 ranks cannot be measured on 1 processor cores: they would wait for each other")


def test_a_dry_run_needs_the_layers_of_the_cpu(tmp_path: Path) -> None:
    status, data = run("--dry-run", "--top", "1", "--platform", "cuda", "--megatron", "0.16.1", "--store", str(tmp_path))
    (problem,) = data["problems"]
    assert status == 1
    assert problem["message"] == "a dry run uses the layers of platform cpu, but this job is for cuda"
    assert problem["fix"] == "remove --dry-run, or give --platform cpu"


def test_a_count_decides_what_fits_while_rows_are_looked_for() -> None:
    job = make_search([Layer("test")], {}, made_up("cpu", "0.16.1"), 2)
    (first,) = job.search(MACHINE, float("inf"), 1).rows

    def count(choice: Choice, world: Mapping[str, Any]) -> int:
        return 10**12 if key_of({name: world[name] for name in SIZES}, choice) == first.key else 7

    (other,) = job.search(MACHINE, 1e11, 1, count).rows
    assert other.key != first.key
    assert (other.predicted_bytes, other.fits) == (7, True)


@pytest.mark.long
def test_bytes_of_a_row_are_those_of_a_dry_run_if_asked_for(tmp_path: Path) -> None:
    words = ("--top", "1", "--tp", "2", "--micro-batch-size", "1", "--store", str(tmp_path))
    (_, plain), (status, data) = run(*words), run(*words, "--dry-run")
    (row,), (foretold,) = data["rows"], plain["rows"]
    assert status == 0
    assert row["job"] == foretold["job"]
    assert row["predicted_bytes"] != foretold["predicted_bytes"]
    assert row["predicted_bytes"] == pytest.approx(foretold["predicted_bytes"], rel=0.1)
