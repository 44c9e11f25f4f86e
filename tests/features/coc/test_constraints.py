from types import SimpleNamespace

import pytest

from mindspeed.features.coc.feature import Coc, CocArgs
from mindspeed.plugins import World
from tests.features.resolving import ask


def test_one_tensor_parallel_rank_leaves_it_nothing_to_do():
    notes = [row.text for row in ask("coc", tp=1).rows if row.feature == "coc" and row.kind == "note"]
    assert notes == ["tp is 1, so linear layers are not split over ranks and exchange no data"]
    assert [row.text for row in ask("coc", tp=2).rows if row.feature == "coc" and row.kind == "note"] == []


@pytest.mark.parametrize(("asked", "rows", "parts"), [(4, 32, 4), (4, 16, 2), (8, 36, 4), (2, 15, 1), (8, 4096, 8)])
def test_parts_that_do_not_fit_fall_to_the_next_smaller_number(asked: int, rows: int, parts: int):
    assert Coc(CocArgs(parts=asked), World({})).parts_of(rows) == parts


def test_mode_one_is_one_part_and_mode_zero_leaves_the_layers():
    assert Coc(CocArgs(mode=1), World({})).parts_of(32) == 1
    spec = SimpleNamespace()
    assert Coc(CocArgs(mode=0), World({})).layer_spec(spec, None) is spec
    assert Coc(CocArgs(parts=1), World({})).layer_spec(spec, None) is spec


def test_a_model_without_megatrons_linear_layers_is_told():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from mindspeed.tensor_parallel.layers import missing_linear_layers

    feature = Coc(CocArgs(), World({}))
    assert [*missing_linear_layers(feature, get_gpt_layer_local_spec(), None)] == []
    assert [*missing_linear_layers(feature, SimpleNamespace(), None)] == [
        "no layer of the model is Megatron's ColumnParallelLinear or RowParallelLinear"
    ]
