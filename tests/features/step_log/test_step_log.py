"""What step-log writes and counts; `tests/cli/test_compare.py` trains with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed import registry
from mindspeed.engine.resolution.request import Layer
from mindspeed.features.step_log.feature import StepLog, StepLogArgs
from mindspeed.files.step_log import read_log
from mindspeed.platforms.cpu import COLLECTIVES


def test_each_step_is_a_row_of_the_file_that_is_set(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    feature = StepLog(StepLogArgs(file=str(file)), registry.probe("cpu"))  # type: ignore[arg-type]
    for step in (1, 2):
        feature.log_metrics(step, {"loss": 5.0 / step, "costs.peak_mib": 3.0})
    assert read_log(file) == [
        {"step": 1, "loss": 5.0, "costs": {"peak_mib": 3.0}},
        {"step": 2, "loss": 2.5, "costs": {"peak_mib": 3.0}},
    ]


@pytest.mark.parametrize(("platform", "count"), [("cpu", 0), ("cuda", len(COLLECTIVES)), ("npu", len(COLLECTIVES))])
def test_collectives_are_wrapped_where_the_platform_does_not_count_them(platform: str, count: int) -> None:
    plan = registry.resolve([Layer("test", features=("step-log",), world={"world_size": 1}, platform=platform)])
    assert len([planned for planned in plan.patches if planned.owner == "step-log" and "c10d" in planned.site]) == count
