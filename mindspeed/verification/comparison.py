"""Comparing two runs: every tensor of the feature's run, on every rank that has a part of it, with the baseline's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from mindspeed.plugins.feature import Numerics
from mindspeed.verification.record import RankResult, TensorShard

_BF16: Final = (1e-2, 8e-2, 2.5e-2)
"""Bounds of loss, gradient and weight for bf16 where the claim is not exact: both runs round every operation to 2**-8,
and may differ by several such roundings. Unmodified Megatron in bf16 is up to 5.3e-2 (one gradient) from itself in fp32."""

_STATE: Final = "optimizer state"


@dataclass(frozen=True, slots=True)
class ComparisonResult:
    """The result of a comparison. ``largest_difference`` is None where there was nothing to compare: then it does not hold.

    ``idle`` is a row about a feature that has nothing to do in this case.
    """

    what: str
    largest_difference: float | None
    tolerance: float
    idle: bool = False

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
    checks = [_compare_losses(baseline, feature, tolerances.loss)]
    for kind, name in sorted(expected.keys() | actual.keys(), key=lambda key: (list(bounds).index(key[0]), key[1])):
        both = (kind, name) in expected and (kind, name) in actual
        difference = _difference(expected[kind, name], actual[kind, name]) if both else None
        checks.append(ComparisonResult(f"{kind} of {name}", difference, bounds[kind]))
    return checks


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
    if len(expected) != len(actual) or not expected or not np.isfinite(actual).all():
        return ComparisonResult(what, None, tolerance)
    return ComparisonResult(what, max(abs(a - b) / abs(a) for a, b in zip(expected, actual, strict=True)), tolerance)


def _shards(records: Sequence[RankResult]) -> tuple[int, dict[str, int], str | None, list[str]]:
    """What decides which states each rank has, in which order: the ranks, their groups, whether states are split over
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
