"""Seconds of a step for every layout: what it does, and how long a machine takes for each kind of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mindspeed.arithmetic import BYTES, layer_forward, logits_forward, rank_parameters, shape_of_world
from mindspeed.plugins.estimates import Estimate
from mindspeed.tuning.schedule import rounds
from mindspeed.tuning.space import Layouts

Numbers = NDArray[np.float64]

KINDS: Final = (
    "step",
    "layer",
    "flops",
    "tp_call",
    "tp_byte",
    "pp_call",
    "pp_byte",
    "cp_byte",
    "ep_byte",
    "dp_byte",
    "parameter",
)
"""Kinds of work: a step, a layer of one micro-batch, an operation, calls and bytes of groups, an updated parameter."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Seconds of one unit of each kind of work, and the processor cores that ranks of the cpu platform share."""

    seconds: Mapping[str, float]
    cores: int = 0

    def to_json(self) -> dict[str, Any]:
        return {"seconds": dict(self.seconds), "cores": self.cores}


DEFAULTS: Final[dict[str, dict[str, float]]] = {
    "cpu": dict(
        zip(KINDS, (2e-2, 1.5e-3, 1 / 2e10, 2e-4, 1 / 1e9, 3e-4, 1 / 1e9, 1 / 1e9, 1 / 1e9, 1 / 1e9, 2e-9), strict=True)
    ),
    "cuda": dict(
        zip(KINDS, (1e-3, 3e-5, 1 / 4e14, 2e-5, 1 / 3e11, 2e-5, 1 / 5e10, 1 / 3e11, 1 / 1e11, 1 / 1e11, 1e-11), strict=True)
    ),
    "npu": dict(
        zip(KINDS, (1e-3, 5e-5, 1 / 2e14, 3e-5, 1 / 1e11, 3e-5, 1 / 2e10, 1 / 1e11, 1 / 5e10, 1 / 5e10, 2e-11), strict=True)
    ),
}
"""Units of a machine that was not measured: orders of magnitude, for ranking alone."""


FORWARD: Final = 1 / 3
"""Share of the forward pass in the time of a layer."""


@dataclass(frozen=True, slots=True)
class TimeBasis:
    """The work of plain Megatron on the busiest rank, per kind, for every layout."""

    work: Mapping[str, Any]
    rounds: Numbers
    layers: Any
    gradient_bytes: Any
    ranks_per_core: float


def basis(layouts: Layouts, cores: int = 0) -> TimeBasis:
    """Compute the work that no feature changes. A pipeline's fill and drain counts as further micro-batches."""
    shape, element = shape_of_world(layouts), BYTES[layouts.dtype]
    turns = rounds(layouts.pp, layouts.vpp, layouts.num_micro_batches)
    layers = layouts.num_layers / layouts.pp
    samples = layouts.micro_batch_size
    share = samples / (layouts.tp * layouts.cp)
    forward = layer_forward(shape, moe=bool(shape.num_experts)) * layers + logits_forward(shape)
    tokens = samples * layouts.seq_length / layouts.cp
    message = tokens * shape.hidden_size * element
    dense, experts = rank_parameters(layouts)
    replicas = layouts.dp * layouts.cp
    work = {
        "step": 1.0,
        "layer": turns * layers,
        "flops": turns * 3 * forward * share,
        "tp_call": turns * layers * 4 * (layouts.tp > 1),
        "tp_byte": turns * layers * 4 * 2 * message * (layouts.tp - 1) / layouts.tp,
        "pp_call": turns * 2 * layouts.vpp * (layouts.pp > 1),
        "pp_byte": turns * 2 * layouts.vpp * message * (layouts.pp > 1),
        "cp_byte": turns * layers * 4 * message * (layouts.cp - 1),
        "ep_byte": turns * layers * 4 * message * shape.router_topk * (layouts.ep - 1) / layouts.ep,
        "dp_byte": 2 * 4 * (dense + experts) * (replicas - 1) / replicas,
        "parameter": dense + experts,
    }
    crowd = max(1.0, layouts.world_size / cores) if cores else 1.0
    return TimeBasis(work, turns, layers, work["dp_byte"], crowd)


def work_of(base: TimeBasis, estimates: Iterable[Estimate]) -> dict[str, Any]:
    """Return the work of every layout under these features, by kind."""
    work = dict(base.work)
    for estimate in estimates:
        work["flops"] = work["flops"] + base.rounds * base.layers * estimate.flops
        work["layer"] = work["layer"] + base.work["layer"] * estimate.repeated * FORWARD
        for kind in ("tp_call", "tp_byte", "cp_byte", "ep_byte"):  # half of the messages belong to the forward pass
            work[kind] = work[kind] + base.work[kind] * estimate.repeated / 2
        for traffic in estimate.traffic:
            if not traffic.hidden:
                kind = f"{traffic.group}_byte"
                work[kind] = work[kind] + base.rounds * base.layers * traffic.bytes * traffic.calls
        if estimate.overlap_gradients:
            work["dp_byte"] = work["dp_byte"] - base.gradient_bytes / 2 * (1 - 1 / np.maximum(base.rounds, 1))
        if estimate.overlap_weights:
            work["dp_byte"] = work["dp_byte"] - base.gradient_bytes / 4
    return work


def step_seconds(work: Mapping[str, Any], machine: Machine, crowd: float = 1.0) -> Numbers:
    """Return the seconds of a step; computation takes ``crowd`` times as long where ranks share cores."""
    total: Any = 0.0
    for kind in KINDS:
        busy = crowd if kind in ("layer", "flops", "parameter") else 1.0
        total = total + machine.seconds[kind] * busy * work[kind]
    return np.asarray(total, dtype=np.float64)


PULLS: Final = (1e-7, 1e-5, 1e-3, 1e-2, 1e-1, 1.0)
"""Weights of the prior that a fit chooses from; a measured step has the weight 1."""


def fit(rows: list[dict[str, float]], seconds: list[float], prior: Machine, crowd: float = 1.0) -> Machine:
    """Fit the units of a machine to measured steps: least squares of relative errors, no unit below zero, drawn to ``prior``.

    The pull of the prior is the one by which each measured step is predicted best from all others.
    """
    busy = np.array([crowd if kind in ("layer", "flops", "parameter") else 1.0 for kind in KINDS])
    start = np.array([prior.seconds[kind] for kind in KINDS])
    design = np.array([[row[kind] for kind in KINDS] for row in rows]) * busy * start / np.array(seconds)[:, None]
    pull = min(PULLS, key=lambda weight: _left_out_error(design, weight)) if len(rows) > 2 else PULLS[-1]
    factors = _nonnegative(design, pull)
    return Machine(dict(zip(KINDS, (float(value) for value in factors * start), strict=True)), prior.cores)


def _left_out_error(design: Numbers, weight: float) -> float:
    """Return the sum of squared relative errors of each row when the others alone are fitted."""
    numbers = range(len(design))
    return sum(float((design[n] @ _nonnegative(np.delete(design, n, 0), weight) - 1) ** 2) for n in numbers)


def _nonnegative(design: Numbers, weight: float) -> Numbers:
    """Return factors that give 1 for each row and are near 1 themselves; the most negative one becomes 0 until none is."""
    count = design.shape[1]
    gram = design.T @ design + weight * np.eye(count)
    target = design.sum(axis=0) + weight
    free = np.ones(count, dtype=np.bool_)
    while True:
        factors = np.zeros(count)
        factors[free] = np.linalg.solve(gram[np.ix_(free, free)], target[free])
        if factors.min() >= 0:
            return factors
        free[factors.argmin()] = False
