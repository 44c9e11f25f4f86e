"""The report of a run of Megatron-LM: its log, its record of a step, and the page that they give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mindspeed.cli import main
from mindspeed.files.step_log import read_log
from mindspeed.files.step_record import read_records
from tests.megatron_lm.checkout import LLAMA, MOE, Checkout
from tests.page_structure import PageStructure, charts_without_units

PIPELINE = ("--pipeline-model-parallel-size", "2")
EXPERTS = (*MOE, "--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall")


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "stages", "feature"),
    [(PIPELINE, 2, "swiglu"), (EXPERTS, 1, "moe-alltoall-overlap")],
    ids=["dense", "moe"],
)
def test_a_run_of_megatron_lm_has_a_report(tmp_path: Path, flags: Any, stages: int, feature: str) -> None:
    features = ("--features", f"step-log,{feature}")
    Checkout(tmp_path).adapted(2, *LLAMA, *flags, "--train-iters", "8", *features).ended_well()
    assert [row["step"] for row in read_log(tmp_path / "log.jsonl")] == list(range(1, 9))
    records = read_records(tmp_path)
    assert [(record.stage, record.step, record.memory_step) for record in records] == [(stage, 3, 2) for stage in range(stages)]
    for record in records:
        assert sum(record.sections.values()) == pytest.approx(record.seconds)
        assert {"forward", "backward", "optimizer"} <= record.sections.keys()
    done = CliRunner().invoke(main, ["report", str(tmp_path)], catch_exceptions=False)
    assert (done.exit_code, done.stderr) == (0, "")
    text = (tmp_path / "report.html").read_text("utf-8")
    page = PageStructure(text)
    assert {"Curves", "Time of a step by section", "Memory", "Pipeline schedule", "Features and patches"} <= set(page.sections)
    assert {"Loss", "Time of a step", "Peak memory of a step", "Communication of a step", "Stage 0"} <= page.figures.keys()
    assert page.figures["Stage 0"][-3:] == ["measured", "planned", "planned peak"]
    assert charts_without_units(page.figures) == []
    assert (page.loaded, page.tags & {"script", "link"}, page.has_dark_scheme) == ([], set(), True)
    assert feature in page.pictures[-1]
