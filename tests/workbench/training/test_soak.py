"""Runs that are ended at random moments go on exactly; a long run keeps its memory. The whole form is `soak.py`."""

import json
import os
import time
from pathlib import Path

import psutil
import pytest

from tests.workbench.training import soak
from tests.workbench.training.conftest import Run, log

pytestmark = pytest.mark.long
WHOLE = pytest.mark.exhaustive("python -m tests.workbench.training.soak FOLDER runs it in turns")

TEN = (
    *("deterministic", "rms-norm", "swiglu", "rotary-embedding", "flash-attention", "matmul-add", "tflops"),
    *("activation-recompute", "norm-recompute", "swap-optimizer"),
)
STEADY = (
    *("--num-layers=2", "--hidden-size=32", "--num-attention-heads=4", "--seq-length=32", "--global-batch-size=2"),
    *("--micro-batch-size=1", "--log-interval=10", "--eval-iters=1", "--sample-tokens=1"),
    *("--normalization=RMSNorm", "--activation=silu", "--gated-linear-unit", "--rotary", "--no-linear-bias"),
)


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param({"kill": 1, "signal": 1}, id="2 faults"),
        pytest.param({"kill": 40, "signal": 40}, id="80 faults", marks=WHOLE),
    ],
)
def test_runs_that_are_ended_at_random_moments_go_on_exactly(tmp_path: Path, faults: dict[str, int]) -> None:
    data = soak.prepare_text(tmp_path)
    assert soak.soak(tmp_path, data, faults, steps=20 if faults["kill"] == 1 else 120, minutes=600)
    rows = [json.loads(line) for line in (tmp_path / "faults.jsonl").read_text().splitlines()]
    assert sum("fault" in row for row in rows) == sum(faults.values())
    assert any("finished" in row for row in rows)


@pytest.mark.parametrize("steps", [300, pytest.param(2000, marks=WHOLE)])
def test_a_long_run_with_ten_features_keeps_memory_descriptors_and_threads(tmp_path: Path, text: str, steps: int) -> None:
    """Resident memory after a tenth of the steps, and after all but the last of them."""
    run = tmp_path / "run"
    started = Run(*STEADY, "--features", ",".join(TEN), "--data", text, "--run", run, "--train-iters", steps + 50, cold=True)
    started.wait_for_step(run, steps // 10)
    first = state(started.rank(0))
    started.wait_for_step(run, steps)
    last = state(started.rank(0))
    started.done()
    assert set(TEN) <= {feature["name"] for feature in json.loads((run / "plan.json").read_text())["features"]}
    assert [row["step"] for row in log(run) if "loss" in row] == list(range(1, steps + 51))
    assert last[1:] == first[1:]
    assert last[0] <= 1.01 * first[0]


def state(process: psutil.Process) -> tuple[int, int, int]:
    """Resident bytes, the smallest of a few samples, open descriptors and threads."""
    sizes = []
    for _ in range(5):
        sizes.append(process.memory_info().rss)
        time.sleep(0.05)
    return min(sizes), len(os.listdir(f"/proc/{process.pid}/fd")), process.num_threads()
