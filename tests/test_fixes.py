"""Every fix that is printed mends its problem, and following the first ones leads to a request that is accepted."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import pytest

from mindspeed.engine.resolution.applied_fixes import JobRequest, applied
from mindspeed.engine.resolution.environment import made_up
from mindspeed.engine.resolution.request import Layer
from mindspeed.problems import Fix
from tests.features.resolving import MODEL
from tests.fixes_applied import drawn, followed, left_by_alternatives, problems_of, written

SHARE = 5
"""Requests of one test."""
ENDS = ("accepted", "nothing mends it")


def failures(requests: Iterable[tuple[str, JobRequest]]) -> list[str]:
    """Return the requests whose fixes lead nowhere, with what happened."""
    outcomes = [(name, followed(request)) for name, request in requests]
    return [f"{name}: {outcome.kind}\n" + "\n".join(outcome.trail) for name, outcome in outcomes if outcome.kind not in ENDS]


@pytest.mark.parametrize("first", range(0, 20, SHARE))
def test_the_fixes_of_drawn_requests_lead_to_acceptance(first: int) -> None:
    assert failures((f"seed {seed}", drawn(seed)) for seed in range(first, first + SHARE)) == []


@pytest.mark.parametrize("first", range(0, 20, SHARE))
def test_the_fixes_of_written_requests_lead_to_acceptance(first: int) -> None:
    assert failures(islice(written(), first * 10, (first + SHARE) * 10, 5)) == []


def test_each_alternative_mends_its_problem() -> None:
    assert [left for seed in range(SHARE) for left in left_by_alternatives(drawn(seed))] == []


@pytest.mark.long
@pytest.mark.parametrize("first", range(20, 500, 8 * SHARE))
def test_the_fixes_of_further_drawn_requests_lead_to_acceptance(first: int) -> None:
    assert failures((f"seed {seed}", drawn(seed)) for seed in range(first, min(500, first + 8 * SHARE))) == []


@pytest.mark.long
def test_the_fixes_of_all_written_requests_lead_to_acceptance() -> None:
    assert failures(written()) == []


@pytest.mark.long
@pytest.mark.parametrize("first", range(SHARE, 200, SHARE))
def test_each_alternative_of_further_drawn_requests_mends_its_problem(first: int) -> None:
    assert [left for seed in range(first, first + SHARE) for left in left_by_alternatives(drawn(seed))] == []


def fixes(*layers: Layer) -> list[tuple[Fix, ...]]:
    return [problem.fix for problem in problems_of(JobRequest(layers, made_up("cpu", "0.16.1")))]


def test_a_required_feature_is_removed_by_removing_what_requires_it() -> None:
    layer = Layer("command line", features=("grouped-matmul-add",), world=MODEL)
    assert fixes(layer) == [(Fix.give_field("num_experts", 1, or_more=True), Fix.remove_feature("grouped-matmul-add"))]


def test_a_rule_of_several_features_is_one_problem() -> None:
    layer = Layer("command line", features=("moe-zero-memory",), world=MODEL | {"num_experts": 0, "ep": 1})
    dense, _ = problems_of(JobRequest((layer,), made_up("cpu", "0.16.1")))
    assert dense.features == ("expert-parallel", "moe-alltoall-dispatcher", "moe-grouped-gemm")
    assert dense.chain[-1] == "the same rule is that of moe-alltoall-dispatcher, moe-grouped-gemm"


def test_a_feature_that_a_size_brings_in_is_removed_by_the_size() -> None:
    layer = Layer("command line", world=MODEL | {"ep": 2})
    assert fixes(layer) == [(Fix.give_field("num_experts", 2, or_more=True), Fix.give_field("ep", 1))]


def test_a_size_is_given_in_the_spelling_of_its_source() -> None:
    layer = Layer("job file", settings={"tensor-parallel": {"size": 3}}, world=MODEL | {"world_size": 6, "num_query_groups": 8})
    assert fixes(layer)[0][0].name == "tensor-parallel.size"


def test_a_value_of_a_lower_source_is_given_in_the_highest() -> None:
    request = JobRequest((Layer("job file", world={"cp": 2}), Layer("command line")), made_up("cpu"))
    changed = applied(Fix.give_field("cp", 1), request)
    assert changed is not None
    assert [layer.world for layer in changed.layers] == [{"cp": 2}, {"cp": 1}]


def test_a_fix_that_changes_nothing_is_not_applied() -> None:
    request = JobRequest((Layer("command line", features=("alibi",)),), made_up("cpu"))
    assert [applied(fix, request) for fix in (Fix.add_feature("alibi"), Fix.remove_feature("coc"), Fix.advise("wait"))] == [
        None
    ] * 3


def test_a_step_that_is_taken_already_leaves_the_others() -> None:
    request = JobRequest((Layer("command line", world={"pp": 1}),), made_up("cpu"))
    changed = applied(Fix.together((Fix.give_field("pp", 1), Fix.give_field("vpp", 2))), request)
    assert changed is not None
    assert changed.layers[0].world == {"pp": 1, "vpp": 2}
