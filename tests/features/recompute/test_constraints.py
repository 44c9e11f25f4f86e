import pytest

from tests.features.resolving import ask, refusals

FULL = {"granularity": "full", "method": "uniform", "num_layers": 1}


def test_more_layers_than_a_chunk_has_are_all_of_them():
    settings = {"recompute": FULL | {"method": "block", "num_layers": 9}}
    resolution = ask("recompute", settings=settings, world_size=1, num_layers=8)
    assert resolution.problems == []
    assert [row.text for row in resolution.rows if row.kind == "warning"] == [
        "recompute.num_layers=9 is greater than the number of layers of a model chunk "
        "(8 layers / pp=1 / vpp=1), so every layer is recomputed. Give a smaller number to recompute fewer layers"
    ]


@pytest.mark.parametrize(("settings", "slots"), [(FULL, ("recompute-policy",)), ({}, ())])
def test_only_full_recompute_is_the_policy_of_the_job(settings, slots):
    resolution = ask("recompute", settings={"recompute": settings}, world_size=1)
    assert {feature.name: feature.slots for feature in resolution.features}["recompute"] == slots


@pytest.mark.parametrize("feature", ["norm-recompute", "activation-recompute", "swap-attention"])
def test_a_feature_goes_on_beside_other_recomputation(feature):
    for settings in (FULL | {"method": "block"}, {"modules": ["layernorm"]}):
        assert refusals("recompute", feature, settings={"recompute": settings}) == []
