"""The search for the fastest schedule, against a second scheduler, the named schedules and the lower bound."""

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from mindspeed.pipeline.bounds import lower_bound
from mindspeed.pipeline.list_scheduling import ListScheduler, RankLimits
from mindspeed.pipeline.operations import Costs, PipelineShape, Schedule
from mindspeed.pipeline.recomputation import LimitTooSmallError
from mindspeed.pipeline.search import NAMES, fastest, least_kept, named
from mindspeed.pipeline.simulator import SimulationResult, judge, out_of_order
from mindspeed.pipeline.synthesis import megatron
from tests.pipeline.oracle import Oracle

UNEQUAL = Costs(1.0, 1.3, 0.8)


def case(seed: int, most_ranks: int, most_micro_batches: int) -> tuple[PipelineShape, Costs, int | None]:
    """Draw a shape, costs that may differ between stages, and a limit or None."""
    draw = random.Random(seed)
    pp, kind = draw.randint(2, most_ranks), draw.choice(("one", "one", "loop", "v"))
    micro_batches = draw.randint(1, most_micro_batches)
    if kind == "loop":
        micro_batches = pp * max(1, micro_batches // pp)
    shape = PipelineShape(pp, 1 if kind == "one" else 2, micro_batches, "v" if kind == "v" else "loop")

    def duration() -> Any:
        of_stages = tuple(round(draw.uniform(0.5, 2), 2) for _ in range(shape.stages))
        return of_stages if draw.random() < 0.3 else of_stages[0]

    costs = Costs(duration(), duration(), duration(), hop=draw.choice((0.0, 0.0, 0.2)))
    return shape, costs, draw.choice((None, None, least_kept(shape) + draw.randint(1, 2 * pp)))


def rivals(shape: PipelineShape, costs: Costs, limit: int | None, recompute: Any = "none") -> Iterator[SimulationResult]:
    """Judge the named schedules that have a shape and keep a limit."""
    for name in sorted(name for name in NAMES if name != "fastest" and NAMES[name] == shape.placement):
        try:
            verdict = judge(named(name, shape, costs, recompute, limit), costs, limit)
        except ValueError:
            continue
        if not verdict.problems and (limit is None or max(verdict.peak) <= limit):
            yield verdict


def assert_runs(schedule: Schedule, verdict: SimulationResult, limit: int | None) -> None:
    assert verdict.problems == ()
    assert list(out_of_order(schedule)) == []
    assert limit is None or max(verdict.peak) <= limit
    assert verdict.makespan >= verdict.floor * (1 - 1e-9)


def assert_fastest(shape: PipelineShape, costs: Costs, limit: int | None, steps: int, draws: int) -> None:
    schedule, verdict = fastest(shape, costs, "none", limit)
    assert_runs(schedule, verdict, limit)
    assert all(verdict.makespan <= rival.makespan * (1 + 1e-9) for rival in rivals(shape, costs, limit))
    shortest = Oracle(shape, costs, limit).shortest(steps, draws)
    assert verdict.floor <= shortest * (1 + 1e-9)
    assert verdict.makespan <= shortest * 1.01


@pytest.mark.parametrize("seed", range(8))
def test_small_pipelines_are_as_fast_as_a_second_scheduler_finds(seed: int) -> None:
    assert_fastest(*case(seed, 3, 4), steps=1000, draws=20)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(200))
def test_pipelines_are_within_1_percent_of_a_second_scheduler(seed: int) -> None:
    assert_fastest(*case(seed, 8, 16), steps=2000, draws=30)


def test_more_activation_sets_than_megatron_keeps_reach_the_floor_and_its_own_do_not() -> None:
    small, large = PipelineShape(8, 1, 16), PipelineShape(16, 1, 32)
    assert [round(fastest(shape, UNEQUAL)[1].makespan, 6) for shape in (small, large)] == [56.6, 114.2]
    assert [round(lower_bound(shape, UNEQUAL), 6) for shape in (small, large)] == [56.6, 114.2]
    verdict = fastest(small, UNEQUAL, "none", 8)[1]
    assert (round(verdict.makespan, 6), round(verdict.floor, 6)) == (60.1, 60.1)


def test_one_activation_set_runs_micro_batches_one_by_one_and_the_bound_knows() -> None:
    verdict = fastest(PipelineShape(4, 1, 3), Costs(1, 2, 3, hop=0.5), "none", 1)[1]
    assert verdict.makespan == verdict.floor == 3 * (4 * 1 + 4 * 2 + 6 * 0.5 + 3)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_slow_stage_works_without_a_break(stage: int) -> None:
    slow = tuple(3.0 if other == stage else 1.0 for other in range(4))
    verdict = fastest(PipelineShape(4, 1, 12), Costs(slow, slow, slow))[1]
    assert verdict.makespan == verdict.floor
    assert verdict.span_bubble[stage] == pytest.approx(0)


@pytest.mark.parametrize(
    "shape", [PipelineShape(4, 1, 9), PipelineShape(4, 2, 8), PipelineShape(3, 3, 6, group=2), PipelineShape(4, 2, 5, "v")]
)
def test_the_least_limit_is_kept_and_a_smaller_one_refused(shape: PipelineShape) -> None:
    least = least_kept(shape)
    for limit in (least, least + 1):
        assert_runs(*fastest(shape, UNEQUAL, "none", limit), limit)
    if least > 1:
        with pytest.raises(
            LimitTooSmallError, match=f"at least {least} activation sets exist at the same time, but the limit is"
        ):
            fastest(shape, UNEQUAL, "none", least - 1)


@pytest.mark.parametrize("recompute", ["none", "all", "least"])
@pytest.mark.parametrize(("pp", "vpp"), [(2, 2), (2, 3), pytest.param(4, 2, marks=pytest.mark.long)])
def test_a_group_of_any_size_has_a_complete_schedule_near_the_bound(pp: int, vpp: int, recompute: Any) -> None:
    for group in (pp, pp + 1, pp + 2, 2 * pp, 3 * pp):
        for micro_batches in (group - 1, group, group + 1, 2 * group):
            for costs in (Costs(), Costs(1, 2, 0.7)):
                shape = PipelineShape(pp, vpp, micro_batches, group=group)
                schedule, verdict = fastest(shape, costs, recompute)
                assert_runs(schedule, verdict, shape.stages if recompute == "least" else None)
                assert recompute != "none" or verdict.makespan <= 1.1 * verdict.floor, shape


def test_a_timetable_that_stops_half_way_is_an_error() -> None:
    shape = PipelineShape(2, 2, 4, group=4)
    keys = [[[float(micro_batch) for micro_batch in range(4)] for _ in range(shape.stages)] for _ in range(3)]
    forwards = tuple(op.chunk for op in megatron(shape).ops[0] if op.kind == "F")
    with pytest.raises(ValueError, match="ranks stop after 6 of 48 operations, because none is within RankLimits"):
        ListScheduler(shape, Costs(), forwards).run(keys, RankLimits(16, 16, (3, 3, 2, 1)))


@pytest.mark.parametrize("recompute", ["all", "least"])
@pytest.mark.parametrize("shape", [PipelineShape(3, 1, 6), PipelineShape(3, 2, 6), PipelineShape(3, 2, 4, "v")])
def test_recomputation_keeps_its_limit_and_is_no_slower_than_that_of_named_schedules(
    recompute: Any, shape: PipelineShape
) -> None:
    for limit in (1, 3, None):
        schedule, verdict = fastest(shape, UNEQUAL, recompute, limit)
        assert_runs(schedule, verdict, shape.stages if limit is None and recompute == "least" else limit)
        assert all(verdict.makespan <= rival.makespan * (1 + 1e-9) for rival in rivals(shape, UNEQUAL, limit, recompute))


@pytest.mark.parametrize("vpp", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_search_that_does_not_reach_the_bound_ends_within_a_second(vpp: int) -> None:
    forward = (1.5, *(1.0,) * (16 * vpp - 2), 1.9)
    begin = time.process_time()
    verdict = fastest(PipelineShape(16, vpp, 64), Costs(forward, 1.1, 0.7, hop=0.13), "none", 12 * vpp)[1]
    assert time.process_time() - begin < 1
    assert verdict.makespan > verdict.floor * (1 + 1e-9)
