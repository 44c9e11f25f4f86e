"""The log of a run whose folder has that of an earlier one."""

import json
from pathlib import Path

import pytest

from mindspeed.files.step_log import FORMER_LOG, LOG, open_log
from mindspeed.workbench.training.reporting import Reporter


def test_a_new_run_does_not_append_to_the_log_of_one_that_ended_before_its_first_checkpoint(tmp_path: Path) -> None:
    for text in ("first\n", "second\n"):
        with open_log(tmp_path, 0) as log:
            log.write(text)
    assert ((tmp_path / LOG).read_text(), (tmp_path / FORMER_LOG).read_text()) == ("second\n", "first\n")


def test_a_run_that_continues_appends_to_its_log(tmp_path: Path) -> None:
    for step, text in ((0, "first\n"), (5, "second\n")):
        with open_log(tmp_path, step) as log:
            log.write(text)
    assert (tmp_path / LOG).read_text() == "first\nsecond\n"


def test_the_first_step_is_shown_before_the_first_interval_has_passed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reporter = Reporter(tmp_path, first=20, last=40, tokens=64, interval=10)
    for step in (21, 22):
        reporter.step(step, 5.25, 0.1, None, 1.5, {})
    assert [line for line in capsys.readouterr().err.splitlines() if line] == ["step 21/40  loss 5.2500  took 1.5 s"]


def test_a_row_that_a_killed_process_did_not_finish_is_removed(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    with open_log(tmp_path, 1) as file:
        file.write('{"step": 2, "loss": 1.5}\n')
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
