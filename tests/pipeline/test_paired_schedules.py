"""Schedules with pairs: complete, without deadlock, and as long as their formulas say."""

import pytest

from mindspeed.pipeline.operations import Costs, PipelineShape, Schedule
from mindspeed.pipeline.simulator import judge, out_of_order
from mindspeed.pipeline.synthesis import dual_pipe_v, megatron, paired


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("more", [0, 1, 5])
@pytest.mark.parametrize("split", [False, True])
def test_dualpipev_runs_and_lasts_what_its_formula_says(pp: int, more: int, split: bool) -> None:
    schedule = dual_pipe_v(PipelineShape(pp, 2, 2 * pp - 1 + more, "v"), split)
    verdict = judge(schedule)
    assert verdict.problems == ()
    assert list(out_of_order(schedule)) == []
    bubble = 2 * (pp - 1) if split else max(0, 5 * (pp - 1) - 1)
    assert verdict.makespan - 6 * (2 * pp - 1 + more) == bubble
    assert max(verdict.peak) <= 2 * pp + 1


@pytest.mark.parametrize("costs", [Costs(1, 1.5, 0.5), Costs(2, 3, 1)])
def test_the_formula_holds_for_other_costs(costs: Costs) -> None:
    pp, micro_batches = 4, 12
    verdict = judge(dual_pipe_v(PipelineShape(pp, 2, micro_batches, "v"), False), costs)
    f, b, w = costs.of("F", 0), costs.of("B", 0), costs.of("W", 0)
    assert verdict.makespan - 2 * micro_batches * (f + b + w) == pytest.approx((pp - 1) * (f + 2 * b + 2 * w) - f)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 2, 6])
def test_an_evaluation_of_few_micro_batches_runs_without_pairs(micro_batches: int, split: bool) -> None:
    in_a_v = dual_pipe_v(PipelineShape(4, 2, micro_batches, "v"), split)
    assert (judge(in_a_v).problems, list(out_of_order(in_a_v)), in_a_v.pairs) == ((), [], ())
    in_a_loop = paired(PipelineShape(4, 2, 4))
    assert (judge(in_a_loop).problems, in_a_loop.pairs) == ((), ())


@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (2, 2), (3, 2), (4, 3), (8, 2)])
def test_pairs_cost_no_time_and_one_more_pass(pp: int, vpp: int) -> None:
    shape = PipelineShape(pp, vpp, 3 * pp)
    pairs, plain = judge(paired(shape)), judge(megatron(shape))
    assert pairs.problems == ()
    assert pairs.makespan == plain.makespan
    assert max(pairs.peak) == max(plain.peak) + 1


@pytest.mark.parametrize(
    "schedule",
    [dual_pipe_v(PipelineShape(2, 2, 4, "v"), True), megatron(PipelineShape(2, 2, 8, group=4))],
    ids=["pairs", "group"],
)
def test_a_schedule_is_read_as_it_was_written(schedule: Schedule) -> None:
    assert Schedule.from_json(schedule.to_json()) == schedule
