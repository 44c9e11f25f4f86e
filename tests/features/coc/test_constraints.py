from __future__ import annotations

from types import SimpleNamespace

import pytest

from mindspeed.features.coc.feature import Coc, CocArgs
from mindspeed.plugins import MindSpeedError, World
from tests.features.resolving import active, refusals


def test_it_needs_more_than_one_tensor_parallel_rank():
    assert refusals("coc", tp=1) == [
        "MS304 coc: linear layers have no collectives to hide at tensor-parallel size 1 | --tp 2 or more, or remove coc"
    ]
    assert "coc" in active("coc", tp=2)


def test_parts_are_a_power_of_two_up_to_eight():
    assert refusals("coc", tp=2, settings={"coc": {"parts": 3}}) == [
        "MS301 coc.parts is 3: input should be 1, 2, 4 or 8 | "
        "--set coc.parts=4 (parts of a product; more hide more, and start more collectives)"
    ]
    for parts in (1, 2, 4, 8):
        assert refusals("coc", tp=2, settings={"coc": {"parts": parts}}) == []


def test_fused_products_need_a_variant_of_the_operator():
    assert refusals("coc", tp=2, settings={"coc": {"fused": True}}) == [
        "MS304 coc: the operator of fused products has no variant on cpu | --set coc.fused=false"
    ]
    assert refusals("coc", tp=2, platform="npu", settings={"coc": {"fused": True}}) == []


@pytest.mark.parametrize(("asked", "rows", "parts"), [(4, 32, 4), (4, 16, 2), (8, 36, 4), (2, 15, 1), (8, 4096, 8)])
def test_parts_that_do_not_fit_fall_to_the_next_smaller_number(asked: int, rows: int, parts: int):
    assert Coc(CocArgs(parts=asked), World({})).parts_of(rows) == parts


def test_mode_one_is_one_part_and_mode_zero_leaves_the_layers():
    assert Coc(CocArgs(mode=1), World({})).parts_of(32) == 1
    spec = SimpleNamespace()
    assert Coc(CocArgs(mode=0), World({})).layer_spec(spec, None) is spec
    assert Coc(CocArgs(parts=1), World({})).layer_spec(spec, None) is spec


def test_options_and_layers_that_it_cannot_follow_are_refused_when_the_model_is_built():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    feature, local = Coc(CocArgs(), World({})), get_gpt_layer_local_spec()
    assert feature.layer_spec(local, SimpleNamespace(tp_comm_overlap=False)) is not local
    with pytest.raises(MindSpeedError) as overlap:
        feature.layer_spec(local, SimpleNamespace(tp_comm_overlap=True))
    assert [problem.message for problem in overlap.value.problems] == [
        "coc: tp_comm_overlap is set, and layers other than Transformer Engine's ignore it"
    ]
    with pytest.raises(MindSpeedError) as engine:
        feature.layer_spec(SimpleNamespace(), SimpleNamespace(tp_comm_overlap=False))
    (problem,) = engine.value.problems
    assert (problem.message, problem.fix_text) == (
        "coc: the layers of the model that is being built are not Megatron's ColumnParallelLinear and RowParallelLinear",
        "--transformer-impl local, or remove coc",
    )
