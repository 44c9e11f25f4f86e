"""Comparing two runs: every tensor of the feature's run, on every rank that has a part of it, with the baseline's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

import numpy as np

from mindspeed.plugins.feature import Numerics
from mindspeed.workbench.verification.record import RankResult, TensorShard

_BF16: Final = (1e-2, 8e-2, 2.5e-2)
"""Bounds of loss, gradient and weight for bf16 where the claim is not exact: both runs round every operation to 2**-8,
and may differ by several such roundings. Unmodified Megatron in bf16 is up to 5.3e-2 (one gradient) from itself in fp32."""

_STATE: Final = "optimizer state"


@dataclass(frozen=True, slots=True)
class ComparisonResult:
    """The result of a comparison. ``largest_difference`` is None where there was nothing to compare: then it does not hold.

    ``idle`` is a row about a feature that has nothing to do in this case. ``moment`` is the training step of the value, from 1,
    and its place in the order in which a step computes values; of a loss, the first step that leaves the tolerance.
    """

    what: str
    largest_difference: float | None
    tolerance: float
    idle: bool = False
    moment: tuple[int, int] = field(default=(0, 0), compare=False)

    @property
    def holds(self) -> bool:
        return self.largest_difference is not None and self.largest_difference <= self.tolerance


@dataclass(frozen=True, slots=True)
class Tolerances:
    """Relative bounds for one dtype. Zero demands equal bits."""

    loss: float
    gradient: float
    weight: float

    @classmethod
    def of(cls, numerics: Numerics, dtype: str) -> Tolerances:
        if dtype == "bf16" and numerics.claim != "exact":
            claimed = (numerics.loss, numerics.gradient, numerics.gradient)
            return cls(*map(max, claimed, _BF16))
        return cls(numerics.loss, numerics.gradient, numerics.gradient)


def compare(baseline: Sequence[RankResult], feature: Sequence[RankResult], tolerances: Tolerances) -> list[ComparisonResult]:
    """Losses, the input gradient, every parameter gradient of the first step, and every weight after the last step.

    States of the optimizer are compared rank by rank, where both runs have the same ranks and shards, and parameters of the
    same shapes in the same order. They are means of gradients and of their squares, which differ by twice as much.
    """
    expected, actual = _by_tensor(baseline), _by_tensor(feature)
    if _shards(baseline) != _shards(feature) or (tolerances.weight > 0 and _shapes(expected) != _shapes(actual)):
        expected, actual = ({key: of[key] for key in of if key[0] != _STATE} for of in (expected, actual))
    bounds = {"input gradient": tolerances.gradient, "gradient": tolerances.gradient}
    bounds |= {"weight": tolerances.weight, _STATE: 2 * tolerances.gradient}
    steps = len(losses_by_step(baseline))
    order = _order_in_step(baseline)
    checks = [_compare_losses(baseline, feature, tolerances.loss)]
    for kind, name in sorted(expected.keys() | actual.keys(), key=lambda key: (list(bounds).index(key[0]), key[1])):
        both = (kind, name) in expected and (kind, name) in actual
        difference = _difference(expected[kind, name], actual[kind, name]) if both else None
        moment = (1 if "gradient" in kind else steps, order.get((kind, name), len(order)))
        checks.append(ComparisonResult(f"{kind} of {name}", difference, bounds[kind], moment=moment))
    return checks


def first_difference(checks: Iterable[ComparisonResult]) -> str:
    """Name the step and the tensor that left the baseline first; empty where none did."""
    left = [check for check in checks if not check.holds and check.moment[0]]
    first = min(left, key=attrgetter("moment"), default=None)
    if first is None:
        return ""
    step, place = first.moment
    return f"step {step}, {first.what if place else 'loss'}"


def zero_or_not_finite(records: Sequence[RankResult]) -> list[ComparisonResult]:
    """A failing check for each gradient that is zero or not finite anywhere: a run that proves nothing."""
    checks = []
    for (kind, name), pieces in _by_tensor(records).items():
        if "gradient" not in kind:
            continue
        if not all(np.isfinite(piece.values).all() for piece in pieces):
            checks.append(ComparisonResult(f"{kind} of {name} is not finite", None, 0.0))
        elif not any(piece.values.any() for piece in pieces):
            checks.append(ComparisonResult(f"{kind} of {name} is zero", None, 0.0))
    return checks


def losses_by_step(records: Iterable[RankResult]) -> list[float]:
    """Mean loss of each step over all micro-batches; the same micro-batch on several ranks counts once."""
    merged: dict[tuple[int, int], float] = {}
    for record in records:
        merged.update(record.losses)
    steps = sorted({step for step, _ in merged})
    return [float(np.mean([loss for (of, _), loss in sorted(merged.items()) if of == step])) for step in steps]


def _compare_losses(baseline: Sequence[RankResult], feature: Sequence[RankResult], tolerance: float) -> ComparisonResult:
    expected, actual = losses_by_step(baseline), losses_by_step(feature)
    what = f"loss over {len(expected)} steps"
    if len(expected) != len(actual) or not expected:
        return ComparisonResult(what, None, tolerance)
    differences = [abs(a - b) / abs(a) for a, b in zip(expected, actual, strict=True)]
    moment = next(((step, 0) for step, part in enumerate(differences, 1) if not part <= tolerance), (len(expected), 0))
    largest = max(differences) if np.isfinite(actual).all() else None
    return ComparisonResult(what, largest, tolerance, moment=moment)


def _order_in_step(records: Sequence[RankResult]) -> dict[tuple[str, str], int]:
    """Number tensors in the order of a step: gradients from the last parameter to the input, then updated weights."""
    weights = list(dict.fromkeys(piece.name for record in records for piece in record.pieces if piece.kind == "weight"))
    inputs = [(piece.kind, piece.name) for piece in records[0].pieces if piece.kind == "input gradient"]
    gradients = [("gradient", name) for name in reversed(weights)]
    updated = [(kind, name) for name in weights for kind in ("weight", _STATE)]
    return {key: number for number, key in enumerate((*gradients, *inputs, *updated), 1)}


def _shards(records: Sequence[RankResult]) -> tuple[int, dict[str, int], str | None, list[str]]:
    """Return what decides the states of each rank and their order: the ranks, their groups, whether states are split over
    replicas, and the order of parameters, which numbers the states."""
    first = records[0]
    parameters = [piece.name for piece in first.pieces if piece.kind == "weight"]
    split = first.settings.get("DistributedDataParallelConfig.use_distributed_optimizer")
    return len(records), first.sizes, split, parameters


def _shapes(tensors: Mapping[tuple[str, str], Sequence[TensorShard]]) -> dict[str, tuple[int, ...]]:
    """The shape of each state of the optimizer."""
    return {name: pieces[0].shape for (kind, name), pieces in tensors.items() if kind == _STATE}


def _by_tensor(records: Iterable[RankResult]) -> dict[tuple[str, str], list[TensorShard]]:
    shards: dict[tuple[str, str], list[TensorShard]] = {}
    for record in records:
        for shard in record.pieces:
            shards.setdefault((shard.kind, shard.name), []).append(shard)
    return shards


def _difference(expected: Sequence[TensorShard], actual: Sequence[TensorShard]) -> float | None:
    """Norm of the difference over the norm of what was expected; of elements that several ranks have, the worst counts.

    None when ``actual`` leaves a part of the tensor out, has another shape, or is not finite.
    """
    full = np.full(expected[0].shape, np.nan)
    for piece in reversed(expected):
        full[piece.index] = piece.values
    worst = np.full(full.shape, -1.0)
    for piece in actual:
        if piece.shape != full.shape:
            return None
        worst[piece.index] = np.maximum(worst[piece.index], np.abs(piece.values - full[piece.index]))
    norm = float(np.linalg.norm(full))
    if not np.isfinite(worst).all() or worst.min() < 0 or not norm > 0:
        return None
    return float(np.linalg.norm(worst)) / norm
