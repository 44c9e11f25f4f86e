from types import SimpleNamespace

import pytest

from mindspeed.features.coc.feature import Coc, CocArgs
from mindspeed.plugins import World
from tests.features.resolving import ask, refusals


def test_one_tensor_parallel_rank_leaves_it_nothing_to_do():
    notes = [row.text for row in ask("coc", tp=1).rows if row.feature == "coc" and row.kind == "note"]
    assert notes == ["tp is 1, so linear layers have no collectives to overlap"]
    assert [row.text for row in ask("coc", tp=2).rows if row.feature == "coc" and row.kind == "note"] == []


def test_parts_are_a_power_of_two_up_to_eight():
    assert refusals("coc", tp=2, settings={"coc": {"parts": 3}}) == [
        "MS301 coc.parts is 3: input should be 1, 2, 4 or 8 | "
        "--set coc.parts=4 (number of chunks of a product; more chunks overlap more, and start more collectives)"
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


@pytest.mark.parametrize("name", ["coc", "mc2", "tensor-parallel-2d"])
@pytest.mark.parametrize(
    ("world", "text"),
    [
        (
            {"transformer_engine_layers": True},
            "layers are Transformer Engine's, and {name} works on Megatron's local layers "
            "| --no-transformer-engine-layers, or remove {name}",
        ),
        (
            {"tensor_parallel_overlap": True},
            "tp_comm_overlap overlaps collectives of Transformer Engine's layers only, and {name} works on Megatron's "
            "| --no-tensor-parallel-overlap, or remove {name}",
        ),
    ],
)
def test_other_linear_layers_are_refused(name, world, text):
    assert refusals(name, tp=4, **world) == [f"MS304 {name}: {text.format(name=name)}"]


def test_a_model_without_megatrons_linear_layers_is_told():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from mindspeed.tensor_parallel.layers import missing_linear_layers

    feature = Coc(CocArgs(), World({}))
    assert [*missing_linear_layers(feature, get_gpt_layer_local_spec(), None)] == []
    assert [*missing_linear_layers(feature, SimpleNamespace(), None)] == [
        "no layer of the model is Megatron's ColumnParallelLinear or RowParallelLinear"
    ]
