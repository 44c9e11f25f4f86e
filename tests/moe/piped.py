"""The layer of `benchmarks._units_layer`, its transfers waited for early, or not waited for."""

from contextlib import ExitStack
from dataclasses import replace

import torch
import torch.distributed as dist

from benchmarks import _units_layer
from benchmarks._moe_layer import waits_at_once
from benchmarks._units_layer import Measured, Run, plan
from tests.moe.faults import without_wait

__all__ = ["Measured", "Run", "measure", "plan"]


def measure(runs: list[Run]) -> list[Measured]:
    """Measure one run after another, with an all-reduce behind each that divides their transfers in a log."""
    measured = []
    for run in runs:
        with ExitStack() as faults:
            ended = faults.enter_context(without_wait(run.skip))
            if run.early:
                faults.enter_context(waits_at_once())
            measured.append(_units_layer.measure(run))
        measured[-1] = replace(measured[-1], waits=len(ended))
        dist.all_reduce(torch.zeros(1), async_op=True).wait()
    return measured
