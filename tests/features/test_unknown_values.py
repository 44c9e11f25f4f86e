"""A setting of any size, in a job that says nothing else, is a plan or a problem: never an error of Python."""

from contextlib import suppress

import pytest

from mindspeed import registry
from mindspeed.memory_planner.plans import summary
from mindspeed.problems import MindSpeedError

VALUES = (10**30, 3, 1, -(10**30), 1e308, [10**30] * 2, True, "x")
WORLDS = ({}, {"pp": 2, "num_layers": 8}, {"vpp": 10**30, "pp": 2, "num_layers": 8})


def plan_each(values, worlds):
    catalog = registry.catalog()
    for name in sorted(catalog.names):
        for setting in catalog.feature(name).Args.model_fields:
            for value in values:
                for world in worlds:
                    with suppress(MindSpeedError):
                        summary(registry.plan([name], settings={name: {setting: value}}, platform="cpu", world=world), catalog)


@pytest.mark.long
@pytest.mark.budget(20)
def test_every_setting_is_a_plan_or_a_problem_in_a_job_that_says_nothing():
    plan_each(VALUES[:2], WORLDS[:1])


@pytest.mark.long
def test_every_value_of_every_setting_is_a_plan_or_a_problem():
    plan_each(VALUES, WORLDS)
