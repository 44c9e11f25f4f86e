"""The tools under Megatron-LM's own script: numbers in its log, a trace of the asked steps, deterministic results."""

from pathlib import Path

import pytest

from mindspeed.workbench.diagnostics.traces import summarize_folder
from tests.megatron_lm.checkout import LLAMA, Checkout

pytestmark = pytest.mark.long


def test_tools_work_in_megatrons_loop(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    options = ["--features", "tflops,profiler,deterministic", "--set", "tflops.interval=2"]
    window = ["--set", "profiler.start=1", "--set", "profiler.end=3", "--set", f"profiler.folder={folder}"]
    digests = ["--set", "deterministic.digest_interval=1"]
    flags = [*LLAMA, "--train-iters", "4"]
    run = Checkout(tmp_path).launched(1, [*options, *window, *digests], *flags).ended_well()
    (summary,) = summarize_folder(folder, ["tflops"])
    assert summary.steps == (2, 3)
    assert "flops.hardware" in run.log
    assert "deterministic.parameters" in run.log
