from __future__ import annotations

import pytest

from mindspeed.engine.resolution.environment import made_up
from mindspeed.engine.resolution.request import Layer
from mindspeed.engine.resolution.resolver import resolve
from tests.features.resolving import CATALOG, MODEL, active, overrides, refusals

NAME = "adaptive-cp"


def refused(*more, **settings):
    return refusals(NAME, *more, cp=4, settings={NAME: settings})


def test_it_brings_the_group_and_the_mask_along():
    assert sorted(active(NAME, cp=2, world_size=2)) == sorted(["context-parallel", "shared-attention-mask", NAME])


def test_without_a_mask_it_is_refused():
    layer = Layer("command line", features=(NAME,), without=("shared-attention-mask",), world={**MODEL, "cp": 2})
    (problem,) = resolve([layer], CATALOG, made_up("cpu", "0.16.1"), has_variant=lambda op, platform: False).problems
    assert f"{problem.code} {problem.message} | {problem.fix_text}" == (
        "MS210 adaptive-cp requires shared-attention-mask, because all ranks know one mask before the first batch; "
        "else --set adaptive-cp.dynamic_mask=true, and command line removes shared-attention-mask "
        "| drop --without shared-attention-mask, or remove adaptive-cp"
    )


def test_a_mask_that_comes_with_batches_is_made_by_the_data_loader_and_excludes_the_shared_one():
    assert overrides(NAME, dynamic_mask=True) == {"create_attention_mask_in_dataloader": True}
    assert overrides(NAME) == {}
    assert sorted(active(NAME, cp=2, world_size=2, settings={NAME: {"dynamic_mask": True}})) == sorted(
        ["context-parallel", NAME]
    )
    (problem,) = refused("shared-attention-mask", dynamic_mask=True)
    assert "because the mask comes with each batch; --set adaptive-cp.dynamic_mask=false takes the shared one" in problem


def test_a_mask_that_comes_with_batches_reaches_two_stages():
    settings = {NAME: {"dynamic_mask": True}}
    assert refusals(NAME, cp=2, pp=2, settings=settings) == []
    assert refusals(NAME, cp=2, pp=4, settings=settings) == [
        "MS304 adaptive-cp: a mask that comes with each batch does not reach the middle of 4 pipeline stages "
        "| --pp 2 (or less), or add shared-attention-mask to the features and --set adaptive-cp.dynamic_mask=false"
    ]


def test_lists_of_blocks_are_a_function_now():
    assert refused(own_masks=True) == [
        "MS304 adaptive-cp: a list of blocks is not taken from functions that are edited in place "
        "| --set shared-attention-mask.kind=package.module:function, which gives the mask"
    ]


@pytest.mark.parametrize("degree", [3, 4])
def test_neighbours_that_trade_heads_come_in_two_groups_or_more(degree):
    assert refused(ulysses_degree=2) == []
    assert (
        f"two or more groups of {degree} neighbours do not make 4 context-parallel ranks" in refused(ulysses_degree=degree)[0]
    )


def test_heads_divide_among_neighbours():
    assert refusals(NAME, cp=4, tp=2, num_attention_heads=6, num_query_groups=2, settings={NAME: {"ulysses_degree": 2}}) == [
        "MS304 adaptive-cp: 6 attention heads do not divide among 2 x tp = 2 x 2 ranks "
        "| a smaller --set adaptive-cp.ulysses_degree"
    ]


@pytest.mark.parametrize("other", ["alibi", "eod-reset"])
def test_what_it_cannot_do_is_a_conflict(other):
    assert any("adaptive-cp and" in text or "and adaptive-cp" in text for text in refused(other))
