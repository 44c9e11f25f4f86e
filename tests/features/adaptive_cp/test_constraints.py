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
        "MS304 adaptive-cp: the mask of a batch reaches the first and the last pipeline stage only, but pp is 4 "
        "| --pp 2 (or less), or add shared-attention-mask to the features and --set adaptive-cp.dynamic_mask=false"
    ]


def test_a_mask_that_comes_with_batches_is_planned_outside_of_graphs():
    assert refusals(NAME, cp=2, cuda_graphs=True) == []
    assert refusals(NAME, cp=2, cuda_graphs=True, settings={NAME: {"dynamic_mask": True}}) == [
        "MS304 adaptive-cp: layers are captured as CUDA graphs, and adaptive-cp plans each mask that comes with a batch on the "
        "host | --no-cuda-graphs, or add shared-attention-mask to the features and --set adaptive-cp.dynamic_mask=false"
    ]


def test_lists_of_blocks_are_a_function_now():
    assert refused(own_masks=True) == [
        "MS301 adaptive-cp: own_masks reads lists of blocks from edited functions, which is not supported "
        "| --set shared-attention-mask.kind=package.module:function (which returns the mask)"
    ]


@pytest.mark.parametrize("degree", [3, 4])
def test_neighbours_that_trade_heads_come_in_two_groups_or_more(degree):
    assert refused(ulysses_degree=2) == []
    assert refused(ulysses_degree=degree)[0] == (
        f"MS304 adaptive-cp: ulysses_degree {degree} does not split cp=4 into two or more groups of equal size "
        f"| --cp N (two or more times {degree}), or --set adaptive-cp.ulysses_degree=VALUE "
        "(a divisor of 4 that is smaller than it)"
    )


def test_heads_divide_among_neighbours():
    assert refusals(NAME, cp=4, tp=2, num_attention_heads=6, num_query_groups=2, settings={NAME: {"ulysses_degree": 2}}) == [
        "MS304 adaptive-cp: 6 attention heads are not divisible by ulysses_degree x tp = 2 x 2 "
        "| --set adaptive-cp.ulysses_degree=VALUE (a smaller one)"
    ]


@pytest.mark.parametrize("other", ["alibi", "eod-reset"])
def test_what_it_cannot_do_is_a_conflict(other):
    assert any("adaptive-cp and" in text or "and adaptive-cp" in text for text in refused(other))
