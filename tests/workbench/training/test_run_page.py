"""``report.html`` of a run: its sections, its curves, and that it is one file for both colour schemes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed import registry
from mindspeed.engine.resolution.request import Layer
from mindspeed.files.step_log import row
from mindspeed.files.step_record import Level, RecordedSpan, StepRecord
from mindspeed.pipeline.operations import PipelineShape
from mindspeed.workbench.training.run_numbers import read_run
from mindspeed.workbench.training.run_page import mean_costs, report_page
from tests.page_structure import PageStructure, charts_without_units

MODEL: dict[str, Any] = {
    "world_size": 2,
    "pp": 2,
    "num_experts": 0,
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "num_query_groups": 4,
    "vocab_size": 512,
    "seq_length": 64,
    "micro_batch_size": 1,
    "global_batch_size": 2,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "rotary": True,
    "dtype": "fp32",
}
CURVES = ["Loss", "Time of a step", "Peak memory of a step", "Communication of a step", "Gradient norm", "Learning rate"]


def record_of(stage: int) -> StepRecord:
    """Return the record of a stage in 1F1B of two micro-batches; a pass lasts 10 ms, and the whole step 100 ms."""
    order = ["F0", "F1", "D0", "D1"] if stage == 0 else ["F0", "D0", "F1", "D1"]
    begins = (0.01, 0.02, 0.04, 0.06) if stage == 0 else (0.02, 0.03, 0.04, 0.05)
    spans = [RecordedSpan(text[0], 0, int(text[1]), begin, begin + 0.01) for text, begin in zip(order, begins, strict=True)]
    memory = [Level(0.01, 2**20, 0), Level(0.02, 3 * 2**20, 1), Level(0.07, 2**20, 0)]
    return StepRecord(
        3, stage, 2, 100.0, 0.1, (0.01, 0.08), [*spans, RecordedSpan("L", 0, 0, begins[0], begins[0] + 0.002)], 2, memory
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the folder of a run with all that it may contain."""
    folder = tmp_path / "run"
    folder.mkdir()
    others = {"learning_rate": 0.001, "moe.load": 0.5, "costs.peak_mib": 3.0, "costs.communicated_mib": 0.25}
    numbers = {"seconds": 0.1, "gradient_norm": 1.0, **others}
    rows = [row(step, {"loss": 5 - step / 10, **numbers}) for step in range(1, 9)]
    rows += [row(8, {"heldout_loss": 4.25}), row(9, {"loss": float("nan"), "seconds": 0.5, "gradient_norm": None})]
    (folder / "log.jsonl").write_text("".join(rows))
    plan = registry.resolve([Layer("test", features=("swiglu", "step-log"), world=MODEL, platform="cpu")])
    site = next(planned.site for planned in plan.patches if planned.owner == "swiglu")
    effect = {"name": "swiglu", "summary": "swiglu: 2 sites, 2 effective, 1 reached (8 calls)"}
    effect |= {"points": [{"kind": "patch", "name": site, "calls": 8}]}
    (folder / "mindspeed-report.json").write_text(json.dumps({"features": [effect], "plan": plan.to_json()}))
    (folder / "result.json").write_text(json.dumps({"heldout_loss": 4.25, "sample": "<b>"}))
    for stage in range(2):
        record_of(stage).write(folder)
    return folder


@pytest.mark.budget(6)
def test_a_report_shows_curves_times_memory_schedule_and_patches_in_one_file(run: Path) -> None:
    text = report_page(run)
    page = PageStructure(text)
    sections = ["Curves", "Numbers of features", "Time of a step by section", "Memory", "Pipeline schedule"]
    assert page.sections == [*sections, "Features and patches", "Effects of features", "Job", "Result"]
    assert list(page.figures) == [*CURVES, "moe", "Stage 0", "Stage 1"]
    assert charts_without_units(page.figures) == []
    assert page.figures["Loss"][-2:] == ["training", "held out"]
    assert page.figures["Peak memory of a step"][-1] == "planned"
    assert page.figures["Stage 0"][-3:] == ["measured", "planned", "planned peak"]
    assert (page.loaded, page.tags & {"script", "link", "iframe"}, page.has_dark_scheme) == ([], set(), True)
    timeline, graph = page.pictures[-2:]
    assert timeline[:2] == ["as it ran in step 3: 60.0 ms", "rank 0"]
    assert "planned 1f1b, by mean durations: 60.0 ms" in timeline
    assert {"forward", "both gradients"} <= set(timeline)
    assert {"swiglu", "step-log", "pipeline-parallel", "requested", "changes in Megatron"} <= set(graph)
    assert any(line.endswith(", 8 calls") for line in graph)
    assert "<b>4.2000</b><span>from 4.9000, at step 8</span>" in text
    assert "<b>1,280 tokens/s</b>" in text
    assert "<tr><td>forward</td><td>18.00</td><td>18.00</td></tr>" in text
    assert "&lt;b&gt;" in text


@pytest.mark.budget(6)
def test_the_curves_of_a_baseline_lie_below_those_of_the_run(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "log.jsonl").write_text("".join(row(step, {"loss": 5.0, "seconds": 0.2}) for step in range(1, 9)))
    page = PageStructure(report_page(run, read_run(other)))
    assert page.figures["Loss"][-3:] == [str(other), str(run), "held out"]
    assert f"Compared with {other}" in page.sections


def test_two_passes_that_ran_together_count_half_of_their_time_each() -> None:
    spans = [("F", 0, 0.0, 0.02), ("F", 1, 0.02, 0.08), ("D", 0, 0.02, 0.08), ("D", 1, 0.08, 0.12)]
    record = replace(record_of(0), spans=[RecordedSpan(kind, 0, number, begin, end) for kind, number, begin, end in spans])
    costs = mean_costs([record], PipelineShape(1, 1, 2))
    assert costs.of("F", 0) == pytest.approx(0.025)
    assert costs.of("D", 0) == pytest.approx(0.035)


def test_a_log_alone_makes_a_report_and_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(row(1, {"loss": 5.0}))
    text = report_page(tmp_path)
    assert PageStructure(text).sections == ["Curves"]
    assert "too few points for a curve" in text
    (tmp_path / "log.jsonl").write_text("")
    assert PageStructure(report_page(tmp_path)).figures == {}


def test_a_feature_that_is_not_installed_leaves_the_prediction_out(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = registry.catalog()
    without = SimpleNamespace(usable={name: row for name, row in catalog.usable.items() if name != "swiglu"})
    monkeypatch.setattr("mindspeed.workbench.training.run_page.registry.catalog", lambda: without)
    monkeypatch.setattr("mindspeed.workbench.pictures.curves.find_spec", lambda name: None)
    text = report_page(run)
    assert "No prediction: swiglu is not installed here." in text
    assert "planned 1f1b" not in text


def test_without_matplotlib_a_sentence_takes_the_place_of_a_curve(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mindspeed.workbench.pictures.curves.find_spec", lambda name: None)
    text = report_page(run)
    assert text.count("matplotlib is not installed, so there is no curve: pip install matplotlib") == len(CURVES) + 3
    assert "as it ran in step 3" in text


def test_the_sections_of_a_step_are_the_whole_step() -> None:
    sections = record_of(0).sections
    assert sections == pytest.approx(
        {
            "forward": 0.018,
            "data": 0.002,
            "backward": 0.02,
            "waiting for other stages": 0.02,
            "gradient exchange": 0.01,
            "optimizer": 0.02,
            "other": 0.01,
        }
    )
    without_passes = StepRecord(1, 0, 1, 0.0, 1.0, (0.1, 0.7), [RecordedSpan("L", 0, 0, 0.1, 0.2)])
    assert without_passes.sections == pytest.approx({"data": 0.1, "forward and backward": 0.5, "optimizer": 0.3, "other": 0.1})
