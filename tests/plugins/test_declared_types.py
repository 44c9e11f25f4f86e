"""A declaration with a wrong type in a field is a broken row that says so."""

import importlib
import sys

import pytest

from mindspeed.plugins.discovery import discover
from tests.plugins.test_found import put

MODULE = """
from mindspeed.plugins import Category, CheckpointState, Condition, Feature, FeatureSpec, Numerics, Requires

class Clip(Feature):
    spec = {spec}
"""
CASES = {
    'numerics="exact"': "FeatureSpec.numerics is 'exact', not a Numerics",
    'numerics=Numerics("fuzzy")': "Numerics.claim is 'fuzzy', not 'exact' or 'reordered' or 'approximate'",
    'numerics=Numerics.reordered(loss="1e-6")': "Numerics.loss is '1e-6', not a number",
    'slots="linear"': "FeatureSpec.slots is 'linear', not a set of strings",
    "level=True": "FeatureSpec.level is True, not a whole number",
    "megatron=0.16": "FeatureSpec.megatron is 0.16, not a string",
    'ops="swiglu"': "FeatureSpec.ops is 'swiglu', not a tuple of strings",
    'constraints=(Requires(["linear"]),)': "Requires.name is ['linear'], not a string",
    'constraints=(Condition("cp == 1", "no"),)': "Condition.holds is 'cp == 1', not a function",
    'platforms={"gpu"}': "FeatureSpec.platforms contains 'gpu'; allowed are npu, cuda, cpu",
    'sizes={"tq": None}': "FeatureSpec.sizes contains 'tq'; allowed are tp, pp, vpp, cp, ep, dp",
    'state=CheckpointState("mine")': "CheckpointState.kind is 'mine', not 'none' or 'resharded' or 'own'",
}


@pytest.fixture
def row(tmp_path, monkeypatch):
    """A function that gives the row of a feature of distribution acme with this spec."""

    def make(spec: str):
        put(tmp_path, "acme", "clip = acme_clip:Clip")
        (tmp_path / "acme_clip.py").write_text(MODULE.format(spec=spec))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "acme_clip", raising=False)
        importlib.invalidate_caches()
        return next(row for row in discover(only=["clip"]).rows if row.name == "clip")

    return make


@pytest.mark.parametrize("field", CASES)
def test_a_field_with_a_wrong_type_is_a_broken_row_with_distribution_field_and_expected_type(row, field):
    problem = row(f'FeatureSpec("clip", Category.TOOL, {field})').problem
    assert (problem.code, problem.message) == ("MS104", f"the declaration of feature clip is wrong: {CASES[field]}")
    assert problem.where.startswith("acme 1.0")


def test_a_spec_of_another_type_is_a_broken_row(row):
    problem = row("{'name': 'clip'}").problem
    assert problem.message == "the declaration of feature clip is wrong: spec is {'name': 'clip'}, not a FeatureSpec"


def test_a_list_stands_for_a_tuple(row):
    found = row('FeatureSpec("clip", Category.TOOL, constraints=[Requires("tensor-parallel")])')
    assert found.problem is None
    assert len(found.feature.spec.constraints) == 1
