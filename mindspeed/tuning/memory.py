"""Bytes of the rank that has most, for every layout: weights, gradients, optimizer, activations in flight, logits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindspeed.arithmetic import BYTES, layer_activations, optimizer_bytes, rank_parameters
from mindspeed.plugins.estimates import Estimate
from mindspeed.tuning.space import Layouts

Numbers = NDArray[np.float64]
GRADIENT: int = 4
"""Bytes of a gradient: Megatron's buffers are fp32."""


@dataclass(frozen=True, slots=True)
class MemoryBasis:
    """The parts that no feature changes, once for all layouts."""

    weights: Numbers
    gradients: Numbers
    optimizer: Numbers
    activations: Numbers
    in_flight: Numbers
    logits: Numbers


def basis(layouts: Layouts) -> MemoryBasis:
    """Compute the parts of plain Megatron. Activations are of one layer and micro-batch."""
    dense, experts = rank_parameters(layouts)
    count = dense + experts
    kept = layer_activations(layouts)
    element = BYTES[layouts.dtype]
    tokens = layouts.micro_batch_size * layouts.seq_length / layouts.cp
    logits = tokens * layouts.vocab_size / layouts.tp * (element + 4) * (layouts.pp >= 1)
    return MemoryBasis(
        weights=count * element,
        gradients=count * GRADIENT,
        optimizer=count * optimizer_bytes(layouts),
        activations=kept.whole + (kept.split + kept.scores) / layouts.tp,
        in_flight=layers_in_flight(layouts),
        logits=logits,
    )


def layers_in_flight(layouts: Layouts) -> Numbers:
    """Layers times micro-batches whose activations the first stage keeps at once, in 1F1B and its interleaved form."""
    layers, pp, vpp = layouts.num_layers, layouts.pp, layouts.vpp
    batches = layouts.num_micro_batches
    plain = np.minimum(pp, batches) * layers / pp
    warm = np.minimum((vpp - 1) * pp + 2 * (pp - 1) + 1, batches * vpp)
    interleaved = warm * layers / (pp * vpp)
    return np.asarray(np.where(vpp > 1, interleaved, plain), dtype=np.float64)


def peak_bytes(base: MemoryBasis, estimates: Iterable[Estimate]) -> Numbers:
    """Return the bytes of the fullest rank of every layout under these features."""
    weights: Any = base.weights
    gradients: Any = base.gradients
    optimizer: Any = base.optimizer
    activations: Any = base.activations
    temporary: Any = base.logits
    for estimate in estimates:
        weights = weights + estimate.weights
        gradients = gradients + estimate.gradients
        optimizer = optimizer + estimate.optimizer
        activations = activations + estimate.activations
        temporary = temporary + estimate.temporary
    total = weights + gradients + optimizer + np.maximum(activations, 0) * base.in_flight + temporary
    return np.asarray(total, dtype=np.float64)
