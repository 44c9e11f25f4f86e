"""Comparing records: what counts as a difference, and what cannot be compared."""

from typing import Any

import numpy as np
import pytest

from mindspeed.plugins.feature import Numerics
from mindspeed.workbench.verification.comparison import (
    ComparisonResult,
    Tolerances,
    compare,
    first_difference,
    losses_by_step,
    zero_or_not_finite,
)
from mindspeed.workbench.verification.record import RankResult, TensorShard

EXACT = Tolerances.of(Numerics.exact(), "fp32")
REORDERED = Tolerances.of(Numerics.reordered(), "fp32")
FULL = np.arange(1.0, 9.0, dtype=np.float32).reshape(4, 2)
WHOLE = (slice(0, 4), slice(0, 2))
TOP, BOTTOM = (slice(0, 2), slice(0, 2)), (slice(2, 4), slice(0, 2))


def record(*pieces: tuple[Any, Any], kind: str = "gradient", loss: float = 2.0) -> RankResult:
    return RankResult(
        {(0, 0): loss}, [TensorShard(kind, "w", FULL.shape, index, np.asarray(values)) for index, values in pieces]
    )


BASELINE = [record((WHOLE, FULL))]


def gradient_check(*feature: RankResult, tolerances: Tolerances = EXACT) -> ComparisonResult:
    return compare(BASELINE, feature, tolerances)[1]


def test_shards_that_make_up_the_full_tensor_are_equal() -> None:
    assert gradient_check(record((TOP, FULL[:2])), record((BOTTOM, FULL[2:]))) == ComparisonResult("gradient of w", 0.0, 0.0)


def test_the_difference_is_relative_to_the_norm_of_the_baseline() -> None:
    check = gradient_check(record((WHOLE, FULL * np.float32(1.001))))
    assert check.largest_difference == pytest.approx(1e-3, rel=1e-3)
    assert not check.holds


def test_the_worst_copy_of_an_element_counts() -> None:
    wrong = FULL[:2] + 1
    check = gradient_check(record((WHOLE, FULL)), record((TOP, wrong)), record((TOP, FULL[:2])))
    assert check.largest_difference == pytest.approx(2.0 / np.linalg.norm(FULL))


@pytest.mark.parametrize(
    "feature",
    [
        [record((TOP, FULL[:2]))],
        [record((WHOLE, FULL * np.nan))],
        [RankResult({(0, 0): 2.0}, [TensorShard("gradient", "w", (8, 2), WHOLE, FULL)])],
        [record((WHOLE, FULL), kind="weight")],
    ],
    ids=["a part is missing", "not finite", "another shape", "not there"],
)
def test_what_cannot_be_compared_does_not_hold(feature: list[RankResult]) -> None:
    check = gradient_check(*feature)
    assert check.largest_difference is None
    assert not check.holds


def test_rows_of_a_tensor_may_come_in_any_order() -> None:
    assert gradient_check(record((([3, 1], slice(0, 2)), FULL[[3, 1]])), record((([0, 2], slice(0, 2)), FULL[[0, 2]]))).holds


def test_a_loss_is_the_mean_over_micro_batches_each_counted_once() -> None:
    ranks = [RankResult({(0, 0): 1.0, (1, 0): 5.0}), RankResult({(0, 0): 1.0, (0, 1): 3.0, (1, 1): 7.0})]
    assert losses_by_step(ranks) == [2.0, 6.0]


def test_the_loss_is_compared_relative_to_the_baseline() -> None:
    check = compare(BASELINE, [record((WHOLE, FULL), loss=2.0 + 4e-6)], REORDERED)[0]
    assert check.what == "loss over 1 steps"
    assert check.largest_difference == pytest.approx(2e-6)
    assert not check.holds


def test_zero_and_not_finite_gradients_are_named() -> None:
    zero, nan = record((WHOLE, FULL * 0)), record((TOP, FULL[:2] * np.nan))
    assert [check.what for check in zero_or_not_finite([zero])] == ["gradient of w is zero"]
    assert [check.what for check in zero_or_not_finite([zero, nan])] == ["gradient of w is not finite"]
    assert zero_or_not_finite([record((TOP, FULL[:2] * 0)), record((BOTTOM, FULL[2:]))]) == []


def test_an_exact_claim_tolerates_nothing_in_any_dtype() -> None:
    assert (EXACT.loss, EXACT.gradient, EXACT.weight) == (0.0, 0.0, 0.0)
    assert Tolerances.of(Numerics.exact(), "bf16") == EXACT
    assert Tolerances(1e-6, 1e-5, 1e-5) == REORDERED
    assert Tolerances.of(Numerics.reordered(), "bf16") == Tolerances(1e-2, 8e-2, 2.5e-2)


def test_states_of_an_optimizer_are_compared_where_both_runs_have_the_same_shards_and_shapes() -> None:
    def states(*shapes: tuple[int, ...], tp: int = 1, difference: float = 0.0) -> list[RankResult]:
        pieces = [
            TensorShard("optimizer state", f"exp_avg {number} on rank 0", shape, ..., np.ones(shape) + difference)
            for number, shape in enumerate(shapes)
        ]
        return [RankResult({(0, 0): 2.0}, pieces, sizes={"tp": tp})]

    def compared(feature: list[RankResult], tolerances: Tolerances) -> list[float | None]:
        return [check.largest_difference for check in compare(states((2,), (3,)), feature, tolerances)[1:]]

    assert compared(states((2,), (3,), difference=0.5), EXACT) == [0.5, 0.5]
    assert compared(states((2,), (3,), tp=2), EXACT) == []
    assert compared(states((6,)), REORDERED) == []
    assert compared(states((6,)), EXACT) == [None, None]


def trained(gradients: dict[str, float], losses: tuple[float, float] = (2.0, 1.0), weight: float = 1.0) -> RankResult:
    """A record of two steps and two parameters, each with the norm that is given."""
    one, whole = np.ones((1,), np.float32), (slice(0, 1),)
    pieces = [TensorShard("weight", name, (1,), whole, weight * one) for name in ("embedding", "head")]
    pieces += [TensorShard("gradient", name, (1,), whole, value * one) for name, value in gradients.items()]
    pieces.append(TensorShard("input gradient", "embedding", (1,), whole, one))
    return RankResult({(0, 0): losses[0], (1, 0): losses[1]}, pieces)


EQUAL = {"embedding": 1.0, "head": 1.0}


@pytest.mark.parametrize(
    ("run", "first"),
    [
        (trained(EQUAL), ""),
        (trained({"embedding": 2.0, "head": 1.1}, (2.0, 1.5), 2.0), "step 1, gradient of head"),
        (trained({"embedding": 2.0, "head": 1.0}, (2.0, 1.5), 2.0), "step 1, gradient of embedding"),
        (trained({"embedding": 2.0, "head": 2.0}, (2.5, 1.5), 2.0), "step 1, loss"),
        (trained(EQUAL, (2.0, 1.5), 2.0), "step 2, loss"),
        (trained(EQUAL, (2.0, float("nan"))), "step 2, loss"),
        (trained(EQUAL, weight=2.0), "step 2, weight of embedding"),
    ],
)
def test_the_first_step_and_tensor_that_leave_the_baseline_are_named(run: RankResult, first: str) -> None:
    assert first_difference(compare([trained(EQUAL)], [run], REORDERED)) == first
