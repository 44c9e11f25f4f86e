"""Bytes of the rank that has most, for every layout: weights, gradients, optimizer, activations in flight."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindspeed.job.arithmetic import BYTES, optimizer_bytes, rank_parameters
from mindspeed.plugins.estimates import Estimate
from mindspeed.workbench.tuning.activations import Kept
from mindspeed.workbench.tuning.space import Column, Layouts

Numbers = NDArray[np.float64]
GRADIENT: int = 4
"""Bytes of a gradient: Megatron's buffers are fp32."""


@dataclass(frozen=True, slots=True)
class MemoryBasis:
    """The parts that no feature changes, once for all layouts: bytes at rest, and the chunks that end stages have in flight."""

    weights: Numbers
    gradients: Numbers
    optimizer: Numbers
    first: Numbers
    last: Numbers


def basis(layouts: Layouts) -> MemoryBasis:
    """Compute the parts of plain Megatron."""
    dense, experts = rank_parameters(layouts)
    count = dense + experts
    return MemoryBasis(
        weights=count * BYTES[layouts.dtype],
        gradients=count * GRADIENT,
        optimizer=count * optimizer_bytes(layouts),
        first=chunks_in_flight(layouts, 0),
        last=chunks_in_flight(layouts, layouts.pp - 1),
    )


def chunks_in_flight(layouts: Layouts, stage: Any) -> Numbers:
    """Passes through chunks whose activations a stage keeps at once, in 1F1B and its interleaved form."""
    after, batches = layouts.pp - stage - 1, layouts.num_micro_batches
    warm = np.minimum((layouts.vpp - 1) * layouts.pp + 2 * after + 1, batches * layouts.vpp)
    return np.asarray(np.where(layouts.vpp > 1, warm, np.minimum(after + 1, batches)), dtype=np.float64)


def peak_bytes(base: MemoryBasis, rows: Column, kept: Kept, estimates: Iterable[Estimate]) -> Numbers:
    """Return the bytes of the fullest rank of some layouts under these features: one of the first or of the last stage."""
    resting: Any = base.weights + base.gradients + base.optimizer
    for estimate in estimates:
        resting = resting + estimate.weights + estimate.gradients + estimate.optimizer + estimate.temporary
    first, last = base.first[rows], base.last[rows]
    passes = np.maximum(np.where(first > last, first * kept.chunk, 0), kept.last + (last - 1) * kept.chunk)
    return np.asarray(resting[rows] + kept.once + passes, dtype=np.float64)
