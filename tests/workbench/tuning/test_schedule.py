"""Closed forms of a pipeline's length and memory against the simulation of Megatron's schedules."""

import pytest

from mindspeed.memory_planner.stages import passes_in_flight
from mindspeed.pipeline.operations import PipelineShape
from mindspeed.pipeline.simulator import judge
from mindspeed.pipeline.synthesis import megatron
from mindspeed.workbench.tuning.time import rounds

SHAPES = [(1, 1, 4), (2, 1, 2), (2, 1, 8), (4, 1, 4), (4, 1, 12), (2, 2, 4), (2, 4, 8), (4, 2, 8), (4, 3, 16)]


@pytest.mark.parametrize(("pp", "vpp", "micro_batches"), SHAPES)
def test_a_schedule_lasts_as_long_as_its_simulation(pp: int, vpp: int, micro_batches: int) -> None:
    verdict = judge(megatron(PipelineShape(pp, vpp, micro_batches)))
    assert float(rounds(pp, vpp, micro_batches)) * 3 * vpp == pytest.approx(verdict.makespan)


@pytest.mark.parametrize(("pp", "vpp", "micro_batches"), SHAPES)
def test_the_end_stages_keep_what_their_simulation_keeps(pp: int, vpp: int, micro_batches: int) -> None:
    verdict = judge(megatron(PipelineShape(pp, vpp, micro_batches)))
    ends = [passes_in_flight(pp, vpp, micro_batches, stage) for stage in (0, pp - 1)]
    assert ends == [verdict.peak[0], verdict.peak[-1]]
