import pytest

from tests.features.resolving import active, overrides, refusals

NAME = "shared-attention-mask"


def refused(**settings):
    return refusals(NAME, settings={NAME: settings})


def test_the_data_loader_makes_no_mask():
    assert overrides(NAME) == {"create_attention_mask_in_dataloader": False}


def test_kinds_come_with_their_numbers():
    assert refused(kind="causal") == []
    assert refused(kind="sliding-window", width=8) == []
    assert refused(kind="prefix", prefix=8) == []
    assert refused(kind="package.module:function") == []


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        (
            {"kind": "windowed"},
            ".kind is 'windowed': a mask is causal, sliding-window, prefix or package.module:function "
            "| --set {name}.kind=causal, or --set {name}.kind=sliding-window, or --set {name}.kind=prefix",
        ),
        (
            {"kind": "sliding-window"},
            ": width is None for kind=sliding-window; kind=sliding-window needs it, others have none "
            "| --set {name}.width=VALUE, or --set {name}.kind=causal",
        ),
        (
            {"kind": "causal", "width": 4},
            ": width is 4 for kind=causal; kind=sliding-window needs it, others have none "
            "| remove the setting {name}.width, or --set {name}.kind=sliding-window",
        ),
        (
            {"kind": "prefix"},
            ": prefix is None for kind=prefix; kind=prefix needs it, others have none "
            "| --set {name}.prefix=VALUE, or --set {name}.kind=causal",
        ),
        (
            {"kind": "causal", "prefix": 4},
            ": prefix is 4 for kind=causal; kind=prefix needs it, others have none "
            "| remove the setting {name}.prefix, or --set {name}.kind=prefix",
        ),
    ],
)
def test_settings_that_do_not_fit_each_other_are_refused(settings, refusal):
    assert refused(**settings) == [f"MS301 {NAME}{refusal.format(name=NAME)}"]


@pytest.mark.parametrize("algorithm", ["ring-attention", "ulysses-attention", "kv-allgather-cp"])
def test_algorithms_that_take_a_mask_from_the_batch_take_only_a_causal_one_from_here(algorithm):
    assert sorted(active(NAME, algorithm, cp=2, world_size=2)) == sorted(["context-parallel", algorithm, NAME])
    settings = {NAME: {"kind": "prefix", "prefix": 8}}
    (problem,) = refusals(NAME, algorithm, cp=2, settings=settings)
    assert "because any other takes a mask that is not causal from the batch | use adaptive-cp in its place" in problem
    assert active(NAME, algorithm, cp=1, world_size=1, settings=settings)
