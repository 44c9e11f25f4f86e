"""The tools in a run that is saved and resumed: the same bits, and a trace of steps of the run, not of the process."""

import os
from pathlib import Path
from typing import Any

import pytest

from mindspeed.workbench.diagnostics.traces import summarize_folder
from mindspeed.workbench.training.checkpoints import checkpoint_path
from tests.workbench.training.conftest import TINY, Run, log

pytestmark = pytest.mark.long
THREADS = {**{name: value for name, value in os.environ.items() if not name.startswith("MINDSPEED_")}, "OMP_NUM_THREADS": "2"}
DETERMINISTIC = ("--features", "deterministic", "--set", "deterministic.digest_interval=2")


def rows_of(run: Path) -> dict[float, dict[str, Any]]:
    """What the log has of each step, but for its seconds."""
    steps = {row["step"]: dict(row) for row in log(run) if "gradient_norm" in row}
    return {step: {name: row[name] for name in row if name not in ("seconds", "tflops")} for step, row in steps.items()}


def saved(run: Path) -> dict[str, bytes]:
    """The files of tensors in the last checkpoint."""
    found = {path.name: path.read_bytes() for path in checkpoint_path(run, 10).rglob("*.distcp")}
    assert found
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_rerun_and_a_resumed_run_have_the_same_bits(tmp_path: Path, text: str, ranks: int) -> None:
    job = (*TINY, f"--data={text}", "--dropout=0.1", f"--nproc={ranks}", "--global-batch-size=8", *DETERMINISTIC)
    whole, again, rest = (tmp_path / name for name in ("whole", "again", "rest"))
    for run in (whole, again):
        Run(*job, "--train-iters=10", "--save-interval=5", f"--run={run}", env=THREADS).done()
    Run(f"--resume={whole}", "--step=5", f"--run={rest}", f"--nproc={ranks}", env=THREADS).done()
    expected = rows_of(whole)
    assert [step for step, row in expected.items() if "deterministic" in row] == [2, 4, 6, 8, 10]
    assert rows_of(again) == expected
    assert rows_of(rest) == {step: expected[step] for step in (6, 7, 8, 9, 10)}
    assert saved(whole) == saved(again) == saved(rest)


def test_steps_of_a_resumed_run_are_counted_from_its_beginning(tmp_path: Path, text: str) -> None:
    first, rest, folder = tmp_path / "first", tmp_path / "rest", tmp_path / "traces"
    window = ("--set", "profiler.start=3", "--set", "profiler.end=5", "--set", f"profiler.folder={folder}")
    tools = ("--features", "profiler,tflops,swiglu", "--set", "tflops.interval=4", *window)
    Run(*TINY, f"--data={text}", "--train-iters=2", f"--run={first}").done()
    Run(f"--resume={first}", f"--run={rest}", "--train-iters=6", *tools).done()
    (summary,) = summarize_folder(folder, ["swiglu"])
    assert (summary.rank, summary.steps) == (0, (4, 5))
    assert summary.times["feature"].keys() == {"swiglu"}
    assert list(rows_of(rest)) == [3, 4, 5, 6]
    assert all(row["flops"]["hardware"] > 0 for row in rows_of(rest).values())
    refused = Run(f"--resume={rest}", "--train-iters=9", *tools).done(status=1)
    assert "MS301 profiler works in steps 4 to 5, but this run has steps 7 to 9" in refused.err


def test_a_run_that_is_terminated_in_the_window_leaves_its_trace(tmp_path: Path, text: str) -> None:
    run, folder = tmp_path / "run", tmp_path / "traces"
    window = ("--set", "profiler.start=1", "--set", "profiler.end=9000", "--set", f"profiler.folder={folder}")
    started = Run(*TINY, f"--data={text}", "--train-iters=9000", f"--run={run}", "--features=profiler", *window, cold=True)
    started.wait_for_step(run, 2)
    started.process.terminate()
    started.process.communicate(timeout=300)
    (summary,) = summarize_folder(folder, [])
    assert summary.steps[0] == 2
