"""Tests of the reasons of a planned feature: data with a kind, and a sentence that nobody reads back."""

import pytest

from mindspeed.engine.resolution.planned_feature import PlannedFeature, Reason, ReasonKind
from mindspeed.engine.resolution.request import Layer
from mindspeed.engine.resolution.resolver import resolve
from mindspeed.plugins.constraints import Requires
from tests.plugins.synthetic import CPU, ask, catalog, make


@pytest.mark.parametrize(
    ("reason", "line"),
    [
        (Reason("a", ReasonKind.REQUESTED, source="job file"), "a: requested"),
        (Reason("a", ReasonKind.ARGUMENT, source="Megatron's --swiglu"), "a: requested by Megatron's --swiglu"),
        (Reason("a", ReasonKind.REQUIRED, "b"), "a: required by b"),
        (Reason("a", ReasonKind.REQUIRED, "b", note="it owns the group"), "a: required by b, because it owns the group"),
        (Reason("a", ReasonKind.SIZE, name="tp", value=2), "a: the tensor-parallel size is 2"),
        (Reason("a", ReasonKind.LEVEL_ONE), "a: switched on by optimization level 1"),
        (Reason("a", ReasonKind.LEVEL_ONE, note="it is fast"), "a: switched on by optimization level 1; it is fast"),
        (Reason("a", ReasonKind.NAMED, "b", "method", source="API"), "a: b.method (API) names it"),
        (
            Reason("a", ReasonKind.CHOSEN, "b", "method", source="API", note="costs least: 3 bytes"),
            "a: b.method is auto (API), and it costs least: 3 bytes",
        ),
        (Reason("a", ReasonKind.EVERY_PLAN), "a: part of every plan"),
    ],
)
def test_every_kind_has_its_sentence(reason, line):
    assert reason.line == line


def test_a_required_feature_is_not_taken_for_a_requested_one_whatever_its_author_writes():
    known = catalog(make("ring", Requires("base", "the user asks for it")), make("base"))
    base, ring = ask(known, "ring").features
    assert base.why == (
        Reason("base", ReasonKind.REQUIRED, "ring", note="the user asks for it"),
        Reason("ring", ReasonKind.REQUESTED, source="command line"),
    )
    assert (base.requested, ring.requested) == (True, True)


def test_a_request_by_an_argument_of_megatron_is_known_by_its_layer_not_by_its_name():
    known = catalog(make("a"), make("b"))
    layers = [Layer("Megatron's own job file", ("a",)), Layer("Megatron's --b", ("b",), option="--b")]
    kinds = [feature.why[0].kind for feature in resolve(layers, known, CPU).features]
    assert kinds == [ReasonKind.REQUESTED, ReasonKind.ARGUMENT]


def test_only_level_one_alone_leaves_a_feature_unrequested():
    reasons = [Reason("a", kind) for kind in ReasonKind]
    unrequested = [reason.kind for reason in reasons if not PlannedFeature("a", "acme", "1", (reason,), {}).requested]
    assert unrequested == [ReasonKind.LEVEL_ONE]
