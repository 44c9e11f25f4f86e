from __future__ import annotations

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


def test_a_kind_is_named_or_a_function():
    assert refused(kind="windowed") == [
        "MS304 shared-attention-mask: windowed is no kind of mask and no package.module:function "
        "| --set shared-attention-mask.kind=causal, or sliding-window, prefix, or a function of yours"
    ]


@pytest.mark.parametrize(("kind", "width"), [("sliding-window", None), ("causal", 4)])
def test_a_width_belongs_to_a_window(kind, width):
    assert refused(kind=kind, width=width) == [
        "MS304 shared-attention-mask: a width belongs to a sliding window and a sliding window has a width; "
        f"the mask is {kind} and the width {width} "
        "| --set shared-attention-mask.kind=sliding-window --set shared-attention-mask.width=N, or neither"
    ]


@pytest.mark.parametrize(("kind", "prefix"), [("prefix", None), ("causal", 4)])
def test_a_prefix_belongs_to_a_prefix_mask(kind, prefix):
    assert refused(kind=kind, prefix=prefix) == [
        "MS304 shared-attention-mask: a number of tokens that all see belongs to a prefix mask and it has one; "
        f"the mask is {kind} and the prefix {prefix} "
        "| --set shared-attention-mask.kind=prefix --set shared-attention-mask.prefix=N, or neither"
    ]


@pytest.mark.parametrize("algorithm", ["ring-attention", "ulysses-attention", "kv-allgather-cp"])
def test_algorithms_that_take_a_mask_from_the_batch_take_only_a_causal_one_from_here(algorithm):
    assert sorted(active(NAME, algorithm, cp=2, world_size=2)) == sorted(["context-parallel", algorithm, NAME])
    settings = {NAME: {"kind": "prefix", "prefix": 8}}
    (problem,) = refusals(NAME, algorithm, cp=2, settings=settings)
    assert "because any other takes a mask that is not causal from the batch | use adaptive-cp in its place" in problem
    assert active(NAME, algorithm, cp=1, world_size=1, settings=settings)
