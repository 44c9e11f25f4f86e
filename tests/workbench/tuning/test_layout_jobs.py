"""Feasible means what the resolver says."""

import random
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from mindspeed import registry
from mindspeed.engine.resolution.environment import made_up
from mindspeed.engine.resolution.request import Layer
from mindspeed.engine.resolution.resolver import resolve
from mindspeed.ops.availability import running
from mindspeed.workbench.tuning.job import make_search
from mindspeed.workbench.tuning.layout_jobs import Feasibility, FixedRequest
from mindspeed.workbench.tuning.search import key_of, search
from mindspeed.workbench.tuning.space import SIZES, Choice, Layouts, candidates, choices
from mindspeed.workbench.tuning.time import DEFAULTS, Machine
from tests.features.resolving import CATALOG, MODEL

OF_PLATFORM = {"platform": "cpu", "megatron": "0.16.1"}
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 64, "router_topk": 2}


def everywhere(op: str, platform: str) -> bool:
    return True


def space(**model: Any) -> tuple[Layouts, list[Choice]]:
    known = {**MODEL, "dtype": "fp32", "kv_channels": 8, **OF_PLATFORM, **model}
    return Layouts(known, candidates(known, {})), choices(CATALOG, known, (), ())


def feasible_rows(feasibility: Feasibility, choice: Choice) -> Any:
    return feasibility.taken(choice)[0]


def verdict(layouts: Layouts, choice: Choice, row: int) -> bool:
    world = {name: value for name, value in layouts.world(row).items() if name not in OF_PLATFORM}
    layer = Layer("test", choice.features, choice.settings, world)
    base = registry.base_features("cpu")
    return not resolve([layer], CATALOG, made_up("cpu", "0.16.1"), base, everywhere).problems


def differences(layouts: Layouts, tried: list[Choice], rows: int, count: int) -> list[tuple[Choice, dict[str, int]]]:
    """Compare the search with single plans in ``count`` random choices of so many random layouts."""
    feasibility, chosen = Feasibility(CATALOG, layouts, FixedRequest(), everywhere), random.Random(7)
    whole = [int(row) for row in np.flatnonzero(layouts.divides & layouts.whole_batches)]
    some = chosen.sample(whole, min(rows - 5, len(whole))) + chosen.sample(range(len(layouts)), 5)
    verdicts, found = [], []
    for choice in chosen.choices(tried, k=count):
        taken = feasible_rows(feasibility, choice)
        for row in some:
            verdicts.append(verdict(layouts, choice, row))
            found += [(choice, layouts.sizes(row))] if taken[row] != verdicts[-1] else []
    assert any(verdicts)
    assert not all(verdicts)
    return found


@pytest.mark.long
@pytest.mark.parametrize("model", [pytest.param({}, id="dense"), pytest.param(EXPERTS, id="experts")])
def test_two_thousand_configurations_of_25_layouts_are_judged_as_single_plans(model: dict[str, Any]) -> None:
    assert differences(*space(**model), 25, 40) == []


@pytest.mark.long
@pytest.mark.parametrize("model", [{}, EXPERTS, {"world_size": 12, "num_layers": 6}], ids=["dense", "experts", "twelve"])
def test_ten_thousand_configurations_are_judged_as_single_plans(model: dict[str, Any]) -> None:
    assert differences(*space(**model), 100, 34) == []


@pytest.mark.parametrize("name", ["zero-bubble", "nano-pipe", "noop-layers"])
def test_the_search_finds_layouts_for_what_a_single_plan_accepts(name: str) -> None:
    layouts, _ = space()
    taken = feasible_rows(Feasibility(CATALOG, layouts, FixedRequest((name,)), everywhere), Choice())
    rows = range(0, len(layouts), 7)
    assert [bool(taken[row]) for row in rows] == [verdict(layouts, Choice((name,)), row) for row in rows]
    assert taken.any()


def test_a_grid_has_no_feasible_configuration_that_is_missed() -> None:
    layouts, tried = space(world_size=2, num_layers=2, global_batch_size=4)
    feasibility = Feasibility(CATALOG, layouts, FixedRequest(), everywhere)
    for choice in tried[::37]:
        found = [bool(value) for value in feasible_rows(feasibility, choice)]
        assert found == [verdict(layouts, choice, row) for row in range(len(layouts))]


def test_a_removed_feature_makes_what_needs_it_infeasible() -> None:
    layouts, _ = space()
    feasibility = Feasibility(CATALOG, layouts, FixedRequest(without=("tensor-parallel",)), everywhere)
    found = feasible_rows(feasibility, Choice())
    assert not found[layouts.tp > 1].any()
    assert found[layouts.tp == 1].any()


@pytest.mark.long
def test_every_feasible_configuration_of_a_small_world_is_a_row() -> None:
    """All that the resolver takes, tried one by one, is what ``--top 0`` gives for some of the choices."""
    layer = Layer("test", world={"num_layers": 2, "global_batch_size": 4, "seq_length": 32})
    job = make_search([layer], {}, registry.probe("cpu"), 2)
    question = job.question(Machine(DEFAULTS["cpu"]), float("inf"))
    some = question.choices[::11]
    rows = search(replace(question, choices=some), job.catalog, running("cpu"), job.resolved, 0).rows
    taken = set()
    for values in product((1, 2), (1, 2), (1, 2), (1, 2), (1, 2), (1, 2, 4)):
        sizes = dict(zip(SIZES, values, strict=True))
        replicas = 2 // (sizes["tp"] * sizes["pp"] * sizes["cp"])
        if replicas and 4 % (sizes["micro_batch_size"] * replicas) == 0:
            taken |= {key_of(sizes, choice) for choice in some if job.resolved(choice, {**job.model, **sizes}) is not None}
    assert {row.key for row in rows} == taken
    assert len(taken) > 100
