"""What step-log writes, counts and records; `tests/cli/test_compare.py` trains with it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from mindspeed import registry
from mindspeed.engine.resolution.request import Layer
from mindspeed.features.step_log.feature import StepLog, StepLogArgs
from mindspeed.files.step_log import FORMER_LOG, read_log
from mindspeed.files.step_record import read_records
from mindspeed.pipeline.operations import Op
from mindspeed.pipeline.recording import Timed, collect
from mindspeed.platforms.cpu import COLLECTIVES
from mindspeed.plugins.hookspecs import Unit
from mindspeed.process import run


def step_log(recorded_step: int = 3) -> StepLog:
    return StepLog(StepLogArgs(recorded_step=recorded_step), registry.probe("cpu"))  # type: ignore[arg-type]


def test_each_step_is_a_row_in_the_folder_of_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(run.REPORT_VARIABLE, str(tmp_path / "new" / "report.json"))
    for losses in ((9.0,), (5.0, 2.5)):  # the second run begins anew
        feature = step_log()
        for step, loss in enumerate(losses, 1):
            feature.log_metrics(step, {"loss": loss, "costs.peak_mib": 3.0})
        feature.deactivated()
    assert read_log(tmp_path / "new" / "log.jsonl") == [
        {"step": 1, "loss": 5.0, "costs": {"peak_mib": 3.0}},
        {"step": 2, "loss": 2.5, "costs": {"peak_mib": 3.0}},
    ]
    assert [row["loss"] for row in read_log(tmp_path / "new" / FORMER_LOG)] == [9.0]


def test_a_trainer_that_logs_by_itself_gets_no_second_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(run.REPORT_VARIABLE, str(tmp_path / "report.json"))
    monkeypatch.setattr(run, "_folders", [tmp_path / "run"])
    step_log().log_metrics(1, {"loss": 5.0})
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StepLog:
    """Return the feature of a rank that stands for stage 1 of 2, whose memory is 7 bytes, at most 9."""
    monkeypatch.setattr(run, "_folders", [tmp_path])
    monkeypatch.setattr("mindspeed.pipeline.step_recorder.stage_of_rank", lambda: (1, 2))
    feature = step_log(recorded_step=2)
    memory = SimpleNamespace(lap=lambda: (7, 9))
    feature.costs = SimpleNamespace(memory=memory, passes=nullcontext, step=nullcontext)  # type: ignore[assignment]
    return feature


def train_step(feature: StepLog, step: int, operations: Sequence[Timed] = ()) -> None:
    """Call the hooks of a step with one micro-batch, as Megatron does; a schedule of its own has timed its operations."""
    with ExitStack() as inside:
        for around in (feature.around_train_step(SimpleNamespace(step=step)), feature.around_schedule([], False)):
            inside.enter_context(around or nullcontext())
        with feature.around_forward_step(Unit(0)) or nullcontext(), feature.around_data_load() or nullcontext():
            collect(operations)
        with feature.around_backward_step(Unit(0)) or nullcontext():
            pass


def test_the_step_that_is_set_is_recorded_and_later_ones_are_not(recording: StepLog, tmp_path: Path) -> None:
    for step in range(3):
        train_step(recording, step)
    (record,) = read_records(tmp_path)
    assert (record.step, record.stage, record.stages, record.memory_step) == (2, 1, 2, 2)
    assert [(span.kind, span.micro_batch) for span in record.spans] == [("L", 0), ("F", 0), ("D", 0)]
    assert [(level.bytes, level.passes) for level in record.memory][:5] == [(9, 0), (7, 0), (9, 0), (7, 0), (9, 1)]
    assert record.memory[-1].passes == 0
    assert sum(record.sections.values()) == pytest.approx(record.seconds)


def test_the_operations_of_a_schedule_of_its_own_take_the_place_of_the_passes(recording: StepLog, tmp_path: Path) -> None:
    train_step(recording, 0, [Timed(Op("W", 1, 2), 0.0, 1.0, 0.0)])
    (record,) = read_records(tmp_path)
    assert [(span.kind, span.chunk, span.micro_batch) for span in record.spans] == [("L", 0, 0), ("W", 1, 2)]


@pytest.mark.parametrize(("platform", "count"), [("cpu", 0), ("cuda", len(COLLECTIVES)), ("npu", len(COLLECTIVES))])
def test_collectives_are_wrapped_where_the_platform_does_not_count_them(platform: str, count: int) -> None:
    plan = registry.resolve([Layer("test", features=("step-log",), world={"world_size": 1}, platform=platform)])
    assert len([planned for planned in plan.patches if planned.owner == "step-log" and "c10d" in planned.site]) == count
