from itertools import product

import pytest

from mindspeed.features.noop_layers.feature import (
    Weights,
    imbalance,
    layout_text,
    rank_load,
    split_by_places,
    split_by_weight,
    weights_of,
)
from mindspeed.pipeline.operations import PipelineShape
from mindspeed.plugins import World

MODEL = {
    "hidden_size": 64,
    "ffn_hidden_size": 256,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "num_experts": 0,
    "vocab_size": 512,
    "seq_length": 32,
    "gated_linear_unit": False,
}


def test_empty_places_are_taken_from_the_chunks_that_they_are_in():
    assert split_by_places(6, (0, 7), 4) == (1, 2, 2, 1)
    assert split_by_places(3, (1,), 4) == (1, 0, 1, 1)


@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        (5, PipelineShape(2, 1, 1)),
        (7, PipelineShape(2, 2, 1)),
        (6, PipelineShape(3, 1, 1)),
        (4, PipelineShape(3, 2, 1)),
        (7, PipelineShape(2, 2, 1, "v")),
        (4, PipelineShape(3, 2, 1, "v")),
    ],
)
@pytest.mark.parametrize("tail", [0.0, 0.7, 2.5])
def test_no_other_split_has_a_lighter_heaviest_rank(layers, shape, tail):
    weights = Weights(1.0, tail)

    def heaviest(counts):
        return max(rank_load(counts, weights, shape, rank) for rank in range(shape.pp))

    best = min(heaviest(counts) for counts in product(range(layers + 1), repeat=shape.stages) if sum(counts) == layers)
    counts = split_by_weight(layers, weights, shape)
    assert sum(counts) == layers
    assert heaviest(counts) == pytest.approx(best)


def test_without_a_tail_equal_shares_remain():
    shape = PipelineShape(2, 2, 1)
    assert split_by_weight(8, Weights(1.0, 0.0), shape) == (2, 2, 2, 2)
    assert imbalance((2, 2, 2, 2), Weights(1.0, 0.0), shape) == 1.0


def test_a_layer_is_weighed_by_its_products():
    weights = weights_of(World(MODEL), 2)
    assert weights.layer == 2 * 64 * (64 + 32 + 32 + 64) + 2 * 64 * 32 + 2 * 2 * 64 * 256
    assert weights.tail == 2 * 64 * 512


def test_experts_count_as_often_as_a_token_has_them():
    dense, experts = (weights_of(World(MODEL | {"num_experts": number}), 3).layer for number in (0, 8))
    assert experts - dense == 2 * (2 * 2 * 64 * 256)


def test_multi_token_prediction_is_on_the_last_stage():
    weights = weights_of(World(MODEL | {"mtp_num_layers": 1}), 2)
    assert weights.tail == 2 * (2 * 64 * 512) + weights.layer + 4 * 64 * 64


def test_the_layout_is_in_megatrons_letters():
    assert layout_text((2, 0, 1), 0) == "Ett||tL"
    assert layout_text((1, 1), 2) == "Et|tmmL"
