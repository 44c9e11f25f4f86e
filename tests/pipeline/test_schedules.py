"""Closed forms and search: every list is complete, runs, and has the bubble and the memory that it is known for."""

import itertools
import random

import pytest

from mindspeed.pipeline.operations import Costs, Op, PipelineShape, Schedule
from mindspeed.pipeline.recomputation import dropped_sets, least_limit, recompute_all, recompute_least
from mindspeed.pipeline.search import fastest
from mindspeed.pipeline.simulator import judge, out_of_order
from mindspeed.pipeline.synthesis import delayed, lag_by_rank, megatron, zero_bubble_v

EQUAL = Costs()


def makespan(schedule: Schedule, costs: Costs = EQUAL) -> float:
    verdict = judge(schedule, costs)
    assert verdict.problems == ()
    return round(verdict.makespan, 6)


@pytest.mark.parametrize(("pp", "micro", "bubbles"), [(8, 32, (17.95, 9.86, 3.52, 3.52)), (4, 16, (15.79, 8.57, 3.03, 3.03))])
def test_bubbles_of_equal_costs_are_the_known_ones(pp: int, micro: int, bubbles: tuple[float, ...]) -> None:
    interleaved = megatron(PipelineShape(pp, 2, micro))
    schedules = (
        megatron(PipelineShape(pp, 1, micro)),
        interleaved,
        delayed(interleaved, range(pp)),
        zero_bubble_v(PipelineShape(pp, 2, micro, "v")),
    )
    assert tuple(round(judge(schedule).bubble * 100, 2) for schedule in schedules) == bubbles


def test_activations_of_the_floor_schedules_are_1_44_and_1_00_of_1f1b() -> None:
    chunks_of_1f1b = 2 * max(judge(megatron(PipelineShape(8, 1, 32))).peak)
    behind = delayed(megatron(PipelineShape(8, 2, 32)), range(8))
    assert max(judge(behind).peak) / chunks_of_1f1b == 1.4375
    assert max(judge(zero_bubble_v(PipelineShape(8, 2, 32, "v"))).peak) == chunks_of_1f1b


@pytest.mark.parametrize("pp", [2, 3, 5, 8, 16])
def test_lag_of_the_rank_is_at_the_floor_with_megatrons_memory(pp: int) -> None:
    for vpp, times in itertools.product((1, 2, 4), (1, 2, 4)):
        base = megatron(PipelineShape(pp, vpp, pp * times))
        behind = judge(delayed(base, range(pp)))
        assert behind.makespan == behind.floor, base.shape
        assert max(behind.peak) == max(judge(base).peak)


@pytest.mark.parametrize("pp", [1, 2, 3, 8, 16])
def test_the_v_is_at_the_floor_with_the_activations_of_1f1b_and_runs_with_few_micro_batches(pp: int) -> None:
    for micro in (2 * pp - 1, 2 * pp, 4 * pp):
        verdict = judge(zero_bubble_v(PipelineShape(pp, 2, micro, "v")))
        assert (verdict.problems, verdict.makespan, max(verdict.peak)) == ((), verdict.floor, 2 * pp)
    for micro in {1, max(1, pp - 1), pp}:
        assert judge(zero_bubble_v(PipelineShape(pp, 2, micro, "v"))).problems == ()


def test_unequal_costs_are_met_by_the_search_and_not_by_the_v() -> None:
    costs = Costs(10, 13, 8)
    assert round(fastest(PipelineShape(4, 2, 16), costs)[1].bubble * 100, 2) == 2.94
    assert round(judge(zero_bubble_v(PipelineShape(4, 2, 16, "v")), costs).bubble * 100, 2) == 3.78


def test_hops_move_the_best_lag_to_one_and_a_half() -> None:
    costs = Costs(hop=0.2)
    base = megatron(PipelineShape(8, 2, 32))
    lags = {factor: makespan(delayed(base, lag_by_rank(factor, 8)), costs) for factor in (1, 1.5, 2)}
    assert (makespan(base, costs), lags) == (219.0, {1: 203.4, 1.5: 202.0, 2: 204.4})
    assert makespan(zero_bubble_v(PipelineShape(8, 2, 32, "v")), costs) == 205.6
    verdict = fastest(PipelineShape(8, 2, 32), costs)[1]
    assert verdict.floor <= verdict.makespan <= 202 * (1 + 1e-9)


def test_recompute_costs_less_the_earlier_it_stands_and_the_fewer_it_is() -> None:
    base = megatron(PipelineShape(4, 2, 16))
    assert makespan(base, EQUAL.with_recompute_in_backward()) == 140
    assert makespan(recompute_all(base)) == 137
    assert makespan(recompute_all(delayed(base, range(4)))) == 131
    assert makespan(base) == 105
    least = recompute_least(base, 8)
    assert (makespan(least), max(judge(least).peak)) == (106, 8)


def test_a_list_keeps_megatrons_orders_and_one_w_out_of_order_is_seen() -> None:
    base = delayed(megatron(PipelineShape(2, 2, 4)), range(2))
    assert list(out_of_order(base)) == []
    ops = list(base.ops[1])
    first, second = (ops.index(Op("W", 1, micro)) for micro in (0, 1))
    ops[first], ops[second] = ops[second], ops[first]
    swapped = Schedule("swapped", base.shape, (base.ops[0], tuple(ops)))
    assert list(out_of_order(swapped)) == ["rank 1: W of chunk 1 has micro-batch 0 after 1"]


def test_megatrons_group_size_is_followed() -> None:
    ops = megatron(PipelineShape(2, 2, 4, group=4)).ops[0]
    assert [str(op) for op in ops[:6]] == [
        f"F(chunk {c}, micro-batch {m})" for c, m in ((0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1))
    ]


@pytest.mark.parametrize("seed", range(12))
def test_every_list_of_random_sizes_and_costs_runs_and_a_mutated_one_is_refused_or_still_complete(seed: int) -> None:
    draw = random.Random(seed)
    pp, vpp, times = draw.randint(2, 6), draw.randint(1, 3), draw.randint(1, 3)
    costs = Costs(*(draw.uniform(0.5, 2) for _ in range(4)), hop=draw.choice((0, 0.3)))
    base = megatron(PipelineShape(pp, vpp, pp * times, group=draw.choice((None, pp * times))))
    behind = delayed(base, lag_by_rank(draw.choice((0, 0.5, 1, 2)), pp))
    schedules = [base, behind, recompute_all(behind), zero_bubble_v(PipelineShape(pp, 2, draw.randint(1, 3 * pp), "v"))]
    schedules.append(recompute_least(behind, draw.randint(least_limit(behind), pp * vpp + least_limit(behind))))
    for schedule in schedules:
        verdict = judge(schedule, costs)
        assert verdict.problems == ()
        assert verdict.makespan >= verdict.floor * (1 - 1e-9)
        assert judge(_without_one(schedule, draw), costs).problems != ()
        assert judge(_late(schedule, draw), costs).problems != ()


def _without_one(schedule: Schedule, draw: random.Random) -> Schedule:
    """Remove an operation that is not R."""
    rank = draw.randrange(schedule.shape.pp)
    ops = list(schedule.ops[rank])
    del ops[draw.choice([place for place, op in enumerate(ops) if op.kind != "R"])]
    return Schedule("shorter", schedule.shape, (*schedule.ops[:rank], tuple(ops), *schedule.ops[rank + 1 :]))


def _late(schedule: Schedule, draw: random.Random) -> Schedule:
    """Move a forward to the end of its rank."""
    rank = draw.randrange(schedule.shape.pp)
    ops = list(schedule.ops[rank])
    ops.append(ops.pop(draw.choice([place for place, op in enumerate(ops) if op.kind == "F"])))
    return Schedule("late", schedule.shape, (*schedule.ops[:rank], tuple(ops), *schedule.ops[rank + 1 :]))


def test_a_deadlock_names_the_ranks_and_what_each_waits_for() -> None:
    ops = (
        tuple(Op(*words) for words in (("F", 0, 0), ("D", 0, 0), ("F", 0, 1), ("D", 0, 1))),
        tuple(Op(*words) for words in (("F", 0, 0), ("F", 0, 1), ("D", 0, 0), ("D", 0, 1))),
    )
    assert judge(Schedule("edited", PipelineShape(2, 1, 2), ops)).problems == (
        "deadlock: rank 0 waits at D(chunk 0, micro-batch 0) for the gradient of stage 1, micro-batch 0, from rank 1",
        "deadlock: rank 1 waits at F(chunk 0, micro-batch 1) for the output of stage 0, micro-batch 1, from rank 0",
    )


@pytest.mark.parametrize("seed", range(20))
def test_dropped_sets_are_as_few_as_brute_force_finds(seed: int) -> None:
    draw = random.Random(seed)
    shape = PipelineShape(draw.randint(2, 3), draw.randint(1, 2), draw.randint(3, 5))
    base = megatron(shape)
    if draw.random() < 0.5:
        base = delayed(base, lag_by_rank(draw.choice((0.5, 1, 2)), shape.pp))
    ops = base.ops[draw.randrange(shape.pp)]
    limit = draw.randint(least_limit(base), least_limit(base) + 2)
    units = [op[1:] for op in ops if op.kind == "F"]
    fewest = next(
        count
        for count in range(len(units) + 1)
        if any(_most_alive(ops, set(chosen)) <= limit for chosen in itertools.combinations(units, count))
    )
    dropped = dropped_sets(ops, limit)
    assert (len(dropped), _most_alive(ops, dropped) <= limit) == (fewest, True)


def _most_alive(ops: tuple[Op, ...], dropped: set[tuple[int, int]]) -> int:
    alive: set[tuple[int, int]] = set()
    most = 0
    for op in ops:
        if op.kind in ("B", "D") or (op.kind == "F" and op[1:] not in dropped):
            alive.add(op[1:])
        most = max(most, len(alive))
        if op.kind in ("W", "D"):
            alive.discard(op[1:])
    return most


def test_a_limit_below_the_sets_that_wait_for_weight_gradients_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 4 activation sets exist at the same time, but the limit is 2"):
        recompute_least(delayed(megatron(PipelineShape(4, 2, 16)), range(4)), 2)
