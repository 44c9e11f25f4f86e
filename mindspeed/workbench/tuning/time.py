"""Seconds of a step for every layout: what it does, and how long a machine takes for each kind of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mindspeed.job.arithmetic import (
    BYTES,
    ModelShape,
    layers_forward,
    layers_of_rank,
    logits_forward,
    output_parameters,
    rank_parameters,
    shape_of_world,
    widths_of_products,
)
from mindspeed.memory_planner.stages import GRADIENT
from mindspeed.plugins.estimates import Estimate
from mindspeed.workbench.tuning.space import Layouts

Numbers = NDArray[np.float64]

GROUPS: Final = ("tp", "pp", "cp", "ep", "dp")
LINKS: Final = (*GROUPS, "node")
"""Groups that lie within a node, and whatever leaves it."""
MESSAGES: Final = tuple(f"{link}_{kind}" for link in LINKS for kind in ("call", "byte"))
KINDS: Final = ("step", "micro_batch", "layer", "experts", "flops", "moved", *MESSAGES, "parameter")
"""Kinds of work: a step, a micro-batch, a layer of one micro-batch, an expert of such a layer (all of them where they are
grouped), an operation, a byte that products read or write, calls and bytes over each kind of link, an updated parameter.

Products of few rows read as many weights as those of many: bytes tell which products are far below the peak of operations."""
COMPUTED: Final = ("micro_batch", "layer", "experts", "flops", "moved", "parameter")
"""Kinds that take longer where ranks share processor cores."""
OVERLAPPED: Final = {"reduce": 2 / 3, "gather": 1 / 3}
"""Messages of data parallelism that run beside a micro-batch's backward or forward pass, and the share of that pass in it."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Seconds of one unit of each kind of work, and the processor cores that ranks of the cpu platform share."""

    seconds: Mapping[str, float]
    cores: int = 0


def _units(computed: Sequence[float], messages: Sequence[float]) -> dict[str, float]:
    """Units by `COMPUTED` and a step, and calls and bytes within and between nodes."""
    within, between = messages[:2], messages[2:]
    links = dict(zip(MESSAGES, (*(*within,) * len(GROUPS), *between), strict=True))
    return {**dict(zip(("step", *COMPUTED), computed, strict=True)), **links}


DEFAULTS: Final = {
    "cpu": _units((2e-2, 2e-3, 8e-4, 3e-4, 1 / 5e10, 1 / 2e10, 2e-9), (1e-3, 1 / 1e9, 2e-3, 1 / 1e9)),
    "cuda": _units((1e-3, 1e-4, 1e-5, 3e-6, 1 / 4e14, 1 / 2e12, 1e-11), (2e-5, 1 / 3e11, 5e-5, 1 / 5e10)),
    "npu": _units((1e-3, 1e-4, 2e-5, 3e-6, 1 / 2e14, 1 / 1e12, 2e-11), (3e-5, 1 / 1e11, 5e-5, 1 / 2e10)),
}
"""Units of a machine that was not measured: orders of magnitude, for ranking alone."""


@dataclass(frozen=True, slots=True)
class TimeBasis:
    """The work of plain Megatron on the busiest rank, per kind, for every layout, and that of its layers' forward passes."""

    work: Mapping[str, Any]
    forward: Mapping[str, Any]
    rounds: Numbers
    layers: Any
    replicas: Any
    updated: Any
    weight_bytes: int
    leaving: Mapping[str, Any]
    ranks_per_core: float


def basis(layouts: Layouts, cores: int = 0) -> TimeBasis:
    """Compute the work that no feature changes. A pipeline's fill and drain counts as further micro-batches."""
    shape, element = shape_of_world(layouts), BYTES[layouts.dtype]
    turns = rounds(layouts.pp, layouts.vpp, layouts.num_micro_batches)
    layers = layouts.num_layers / layouts.pp
    samples = layouts.micro_batch_size
    share = samples / (layouts.tp * layouts.cp)
    counts = layers_of_rank(layouts, shape)
    operations = layers_forward(shape, counts) + logits_forward(shape)
    dense, experts = rank_parameters(layouts)
    rows = samples * layouts.seq_length / layouts.cp
    message = rows * shape.hidden_size * element
    looked_up = output_parameters(shape).total / layouts.tp * (layouts.pp == 1)  # of two tables one is no operand of a product
    moved = element * (dense - looked_up + experts + rows * widths_of_products(shape, counts, layouts.tp))
    replicas = layouts.dp * layouts.cp
    borders = 4 * (layouts.pp * layouts.vpp - 1) / layouts.pp  # both ends of each, both ways, shared by the ranks
    forward = _layers_forward(layouts, shape, [turns * count for count in counts], message)
    backward = {"layer": 2, "experts": 2, "cp_call": 2, "cp_byte": 2}
    work = {kind: amount * (1 + backward.get(kind, 1)) for kind, amount in forward.items()}
    work["tp_call"] = work["tp_call"] + turns * 10 * (layouts.tp > 1)  # all-reduces of the embedding, the logits, the loss
    summed = 2 + counts.experts  # the loss, its tokens, and a balancing loss of each router, over parts of the sequence
    work["cp_call"] = work["cp_call"] + turns * 2 * summed * (layouts.cp > 1)
    work["tp_byte"] = work["tp_byte"] + turns * 4 * message * (layouts.tp - 1) / layouts.tp
    work |= {
        "step": 1.0,
        "micro_batch": turns,
        "flops": turns * 3 * operations * share,
        "moved": turns * 3 * moved,
        "pp_call": turns * borders,
        "pp_byte": turns * borders * message,
        "dp_call": 2 * (1 + (layouts.ep > 1)) * (replicas > 1),  # experts of several ranks have buffers of their own
        "dp_byte": 0,
        "node_call": 0,
        "node_byte": 0,
        "parameter": dense + experts,
    }
    crowd = max(1.0, layouts.world_size / cores) if cores else 1.0
    expert_replicas = np.maximum(1, replicas / layouts.ep)
    updated = dense * (1 - 1 / replicas) + experts * (1 - 1 / expert_replicas)
    return TimeBasis(work, forward, turns, layers, replicas, updated, element, _leaving_node(layouts), crowd)


def _layers_forward(layouts: Layouts, shape: ModelShape, passes: Sequence[Any], message: Any) -> dict[str, Any]:
    """Return the work of so many passes through layers, beside operations; ``message`` is the bytes of the hidden states.

    An all-reduce is two calls, a reduce-scatter and an all-gather. Over tp attention has one, and the MLP, where experts take
    four gathers and scatters; over each step of a ring of cp go keys and values; over ep tokens, probabilities, answers and
    half a count.
    """
    grouped = layouts.knows("grouped_experts") and layouts.grouped_experts
    own_experts = 1 if grouped else shape.num_experts / layouts.ep
    attention, mlp, sparse = passes
    return {
        "layer": (attention + mlp + sparse) / 2,
        "experts": sparse * own_experts,
        "tp_call": (2 * attention + 2 * mlp + 4 * sparse) * (layouts.tp > 1),
        "tp_byte": 2 * (attention + mlp + sparse) * message * (layouts.tp - 1) / layouts.tp,
        "cp_call": attention * 2 * (layouts.cp - 1),
        "cp_byte": attention * 2 * message * _key_width(shape) / shape.hidden_size * (layouts.cp - 1),
        "ep_call": sparse * 3.5 * (layouts.ep > 1),
        "ep_byte": sparse * 2 * message * shape.router_topk * (layouts.ep - 1) / layouts.ep,
    }


def _key_width(shape: ModelShape) -> float:
    """Return the mean width of keys and values of all heads."""
    if shape.latent is not None:
        return shape.num_attention_heads * (shape.latent.head + shape.latent.rope + shape.latent.value) / 2
    return shape.num_query_groups * shape.kv_channels


def _leaving_node(layouts: Layouts) -> dict[str, Any]:
    """Return for each kind of group whether it has ranks of several nodes, in Megatron's order tp, cp, ep, dp, pp."""
    spans = {
        "tp": layouts.tp,
        "cp": layouts.tp * layouts.cp,
        "ep": layouts.tp * layouts.ep,
        "dp": layouts.tp * layouts.cp * layouts.dp,
        "pp": layouts.world_size,
    }
    node = layouts.ranks_per_node if layouts.knows("ranks_per_node") else layouts.world_size
    return {group: span > node for group, span in spans.items()}


def work_of(base: TimeBasis, estimates: Iterable[Estimate]) -> dict[str, Any]:
    """Return the work of every layout under these features, by kind."""
    estimates = list(estimates)
    repeated = sum(estimate.repeated for estimate in estimates)
    work = {kind: amount + base.forward.get(kind, 0) * repeated for kind, amount in base.work.items()}
    for estimate in estimates:
        work["flops"] = work["flops"] + base.rounds * base.layers * estimate.flops
        for traffic in estimate.traffic:
            if not traffic.hidden:
                calls = base.rounds * base.layers * traffic.calls * (1 + repeated * traffic.forward)
                for kind, amount in ((f"{traffic.group}_call", calls), (f"{traffic.group}_byte", calls * traffic.bytes)):
                    work[kind] = work[kind] + amount
        if estimate.overlap_gradients:
            size = estimate.bucket_size or np.maximum(40_000_000, 1_000_000 * base.replicas)  # as Megatron chooses it
            work["dp_call"] = work["dp_call"] * np.ceil(work["parameter"] / size)
    work |= _replicas(base, estimates)
    for group, leaves in base.leaving.items():
        for kind in ("call", "byte", *(OVERLAPPED if group == "dp" else ())):
            moved = work[f"{group}_{kind}"] * leaves
            work[f"{group}_{kind}"] = work[f"{group}_{kind}"] - moved
            work[f"node_{kind}"] = work.get(f"node_{kind}", 0) + moved
    return work


def _replicas(base: TimeBasis, estimates: Sequence[Estimate]) -> dict[str, Any]:
    """Return the bytes of data parallelism: those that a step waits for, and those beside backward and forward passes."""
    gathers = any(estimate.gathers_weights for estimate in estimates)
    beside_backward = any(estimate.overlap_gradients for estimate in estimates)
    beside_forward = any(estimate.overlap_weights for estimate in estimates)
    reduced, gathered = base.updated * GRADIENT, base.updated * (base.weight_bytes if gathers else GRADIENT)
    if not gathers:  # an all-reduce has both halves
        reduced, gathered = reduced + gathered, 0
    waited = (0 if beside_backward else reduced) + (0 if beside_forward else gathered)
    return {
        "dp_byte": waited,
        "dp_reduce": reduced if beside_backward else 0,
        "dp_gather": gathered if beside_forward else 0,
    }


def exposed(work: Mapping[str, Any], machine: Machine, crowd: float = 1.0) -> dict[str, Any]:
    """Return the work of `KINDS`, with overlapped messages as far as they take longer than the passes that they overlap with.

    Gradients are reduced beside the last backward pass, weights gathered beside the first forward pass of a step.
    """
    computed = sum(machine.seconds[kind] * crowd * work[kind] for kind in ("layer", "experts", "flops"))
    computed = computed / np.maximum(work["micro_batch"], 1)
    found = {kind: work[kind] for kind in KINDS}
    for part, share in OVERLAPPED.items():
        seconds = sum(machine.seconds[f"{link}_byte"] * work[f"{link}_{part}"] for link in ("dp", "node"))
        seen = np.maximum(0, 1 - share * computed / np.maximum(seconds, 1e-12))
        for link in ("dp", "node"):
            found[f"{link}_byte"] = found[f"{link}_byte"] + work[f"{link}_{part}"] * seen
    return found


def step_seconds(work: Mapping[str, Any], machine: Machine, crowd: float = 1.0) -> Numbers:
    """Return the seconds of a step; computation takes ``crowd`` times as long where ranks share cores."""
    total: Any = 0.0
    for kind, amount in exposed(work, machine, crowd).items():
        busy = crowd if kind in COMPUTED else 1.0
        total = total + machine.seconds[kind] * busy * amount
    return np.asarray(total, dtype=np.float64)


PULL: Final = 0.05**2
"""Weight of a unit's prior in a fit, in which a measured step has the weight 1: a step is off by 5 %, a prior by itself."""


def relative_work(
    rows: Sequence[Mapping[str, float]], seconds: Sequence[float], machine: Machine, crowd: float = 1.0
) -> Numbers:
    """Return the share of ``seconds`` that each kind takes in rows of work, by the units of ``machine``: [rows, kinds]."""
    busy = np.array([crowd if kind in COMPUTED else 1.0 for kind in KINDS])
    units = np.array([machine.seconds[kind] for kind in KINDS])
    shares: Numbers = np.array([[row[kind] for kind in KINDS] for row in rows]) * busy * units
    relative: Numbers = shares / np.array(seconds)[:, None]
    return relative


def fit(rows: Sequence[Mapping[str, float]], seconds: Sequence[float], prior: Machine, crowd: float = 1.0) -> Machine:
    """Fit the units of a machine to measured steps: least squares of relative errors, no unit below zero.

    Units are drawn to those of ``prior``, whose computation, calls and bytes are first scaled as a whole: what was not measured
    is taken to be as much faster than the prior as what was. The second time it is known what computation hides.
    """
    parts = np.array([[kind.endswith("_call"), kind.endswith("_byte"), kind not in MESSAGES] for kind in KINDS], dtype=float)
    machine = prior
    for _ in range(2):
        design = relative_work([exposed(row, machine, crowd) for row in rows], seconds, prior, crowd)
        scale = parts @ np.maximum(nonnegative(design @ parts, PULL), 0.1)
        factors = scale * nonnegative(design * scale, PULL)
        units = [float(factor) * prior.seconds[kind] for factor, kind in zip(factors, KINDS, strict=True)]
        machine = Machine(dict(zip(KINDS, units, strict=True)), prior.cores)
    return machine


def nonnegative(design: Numbers, weight: float) -> Numbers:
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


def rounds(stages: Any, chunks: Any, micro_batches: Any) -> Numbers:
    """Return micro-batches and bubble of 1F1B, or with several chunks of its interleaved form, for equal stages.

    The bubble is ``stages - 1`` micro-batches, and ``chunks`` times shorter when a rank works on its chunks in turn.
    """
    return np.asarray(micro_batches + (stages - 1) / chunks, dtype=np.float64)
