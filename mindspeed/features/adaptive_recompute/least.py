"""The least memory of a job, whatever leaves. Light."""

from __future__ import annotations

import math
from typing import Any, Final

from mindspeed.memory.estimate import JobOptions, Stage, stages
from mindspeed.memory.feature import ACTIVATIONS, ATTENTION, NORMS
from mindspeed.plugins import SavedTensors, in_backward, leave

_STAYS: Final = ("layer input", "attention: residual", "mlp: activation input")
MIB: Final = 2**20
NAME: Final = "adaptive-recompute"
SWAPPED: Final = ("core_attention", "linear_proj")
"""Parts of attention that may be on the host. The input of linear_qkv is the output of a norm, which is recomputed."""


def least_saved(args: Any, world: Any, tensors: SavedTensors) -> SavedTensors:
    """Return what is kept where every part leaves, as in the profiling steps; the run fills what a budget has above that."""
    if args.swap:
        names = [tensor for module in SWAPPED for tensor in ATTENTION[module]]
        tensors = in_backward(leave(tensors, names, "swapped", NAME, spare=1), NAME)
    return leave(tensors, (*NORMS, *ACTIVATIONS), "recomputed", NAME)


def least_mb(args: Any, world: Any) -> float:
    """Return the MiB of the largest stage that neither this feature nor another one takes away, rounded down.

    Weights, gradients of the same type, and of each pass in flight what linear layers and residual branches read. The run
    measures the rest.
    """
    options = JobOptions(sequence_parallel=world.tp > 1)
    return math.floor(max(_staying(stage) for stage in stages(world, options)) / MIB * 100) / 100


def _staying(stage: Stage) -> int:
    weights = next(row.bytes for row in stage.rows if row.name == "weights")
    return 2 * weights + sum(row.bytes * row.live for row in stage.rows if row.name in _STAYS)
