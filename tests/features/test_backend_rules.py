"""Every feature with communication runs by the rules of NCCL and HCCL on its smallest layout, or a condition refuses it.

The results are kept for the support table: ``make test-backends`` takes them over.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from mindspeed.engine.resolution.request import Layer
from mindspeed.memory_planner.communicators import communicators
from mindspeed.platforms.backend_rules import NAMES, BackendRules
from mindspeed.plugins import MindSpeedError
from mindspeed.problems import ResolutionError
from mindspeed.workbench.diagnostics.support_matrix import backend_results
from mindspeed.workbench.verification.case import build_case, held_to
from mindspeed.workbench.verification.pool import WorkerPool
from tests.features.resolving import CATALOG

FOLDER: Final = Path(__file__).parents[2] / "build" / "backends"
PASSED: Final = "passed"
MECHANISMS: Final = {
    "ring-attention": "nccl-rules",
    "moe-alltoall-dispatcher": "nccl-rules-eager",
    "distributed-optimizer": "hccl-rules",
    "virtual-pipeline": "nccl-rules",
}
"""A feature for each mechanism of communication, with the rules of the default run."""
COUNTED_FOR_ALL: Final = {"EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP"}
"""Counted for every model with experts, although experts with a capacity do not exchange their numbers of rows."""
CASES: Final = [
    pytest.param(name, rules, marks=[] if MECHANISMS.get(name) == rules else [pytest.mark.long])
    for name in backend_results()
    for rules in NAMES
]


@pytest.mark.budget(6)
@pytest.mark.parametrize(("name", "rules"), CASES)
def test_a_feature_runs_by_the_rules_of_a_backend(pool: WorkerPool, name: str, rules: BackendRules) -> None:
    result = PASSED
    try:
        case = build_case([name], [Layer("test", platform="cpu"), held_to(rules)])
        ranks = pool.run(case.plan, replace(case.recipe, steps=1), int(case.plan.world.world_size))
        if rules == "hccl-rules":
            created = {name for rank in ranks for name in rank.communicators}
            assert set(communicators(case.plan, CATALOG)) - COUNTED_FOR_ALL <= created
    except ResolutionError as error:
        result = f"refused: {error.problems[0].message.removeprefix(f'{name}: ')}"
    except MindSpeedError as error:
        result = f"fails: {error.problems[0]}"
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{name}.{rules}.json").write_text(json.dumps(result), encoding="utf-8")
    assert result == PASSED


def test_every_feature_with_communication_has_a_result_by_all_rules() -> None:
    """`make test-backends` runs them; a feature whose smallest layout has one rank has no row."""
    assert {name: results for name, results in backend_results().items() if set(results) != set(NAMES)} == {}
    assert {result for results in backend_results().values() for result in results.values()} == {PASSED}


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(CATALOG.usable) - set(backend_results())))
def test_a_feature_without_a_result_runs_on_one_rank(name: str) -> None:
    assert build_case([name], [Layer("test", platform="cpu")]).plan.world.world_size == 1
