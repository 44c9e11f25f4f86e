"""The pattern of a hybrid model: what it says of a job, from whatever source, and what its layers compute."""

from dataclasses import replace

import pytest

from mindspeed.job.arithmetic import LayerCounts, forward_flops, parameters, shape_of_world
from mindspeed.job.hybrid_pattern import facts_of_pattern, pattern_of, segmented
from mindspeed.job.megatron_arguments import world_of
from mindspeed.job.world import UnknownValue, World

SIZES = {
    "hidden_size": 16,
    "ffn_hidden_size": 32,
    "num_attention_heads": 4,
    "num_experts": 0,
    "vocab_size": 64,
    "seq_length": 8,
    "gated_linear_unit": True,
    "tied_embeddings": True,
    "normalization": "RMSNorm",
    "rotary": True,
    "qkv_bias": False,
    "qk_norm": False,
}


def test_a_pattern_has_segments_and_depths_of_prediction():
    pattern = pattern_of("*-*-|*E*E/*-/*-")
    assert (pattern.layers, pattern.split, pattern.predictions) == ("*-*-*E*E", (4, 4), ("*-", "*-"))
    assert [pattern.count(kinds) for kinds in ("*", "-", "E", "M")] == [4, 2, 2, 0]
    assert [*pattern.mistakes()] == []
    assert pattern_of("*-").split == ()


@pytest.mark.parametrize(
    ("text", "at", "sentence"),
    [
        ("", 0, "the pattern contains no layer of the decoder"),
        ("*-X-", 2, "'X' is not a layer of Megatron; the layers are * + D - E M G"),
        ("*-/*|-", 4, "multi-token prediction is not split into segments"),
        ("*-/*-/*", 6, "each depth of multi-token prediction must have the same layers, '*-'"),
        ("*-+-", 2, "a model cannot have two kinds of attention, * and +"),
    ],
)
def test_a_mistake_has_its_place(text, at, sentence):
    assert [*pattern_of(text).mistakes()] == [(at, sentence)]


def test_the_mark_stands_under_the_place():
    assert pattern_of("*-X-").marked(2) == "    *-X-\n      ^"


def test_a_pattern_gives_layers_chunks_experts_and_predictions():
    assert facts_of_pattern("*-|*E|*-|*E/*-", stages=2) == {
        "hybrid_layer_pattern": "*-|*E|*-|*E/*-",
        "num_layers": 8,
        "vpp": 2,
        "moe_layers": 2,
        "mtp_num_layers": 1,
        "transformer_engine_layers": True,
        "grouped_experts": True,
    }
    assert facts_of_pattern("+-", 1)["multi_latent_attention"] is True


@pytest.mark.parametrize("dest", ["hybrid_layer_pattern", "hybrid_override_pattern"])
def test_arguments_of_megatron_give_the_pattern_and_what_follows(dest):
    world = world_of({dest: "*-|*-", "pipeline_model_parallel_size": 2})
    assert world["hybrid_layer_pattern"] == ("*-|*-", (dest,))
    assert (world["num_layers"], world["vpp"]) == ((4, (dest,)), (1, (dest,)))
    assert world_of({dest: "*-|*-", "num_layers": 7})["num_layers"] == (7, ("num_layers",))


def test_segments_are_the_split_of_the_layers():
    world = World({"num_layers": 6, "pp": 2, "hybrid_layer_pattern": "*-*-|*-"})
    assert (world.is_hybrid, world.layer_split, world.layers_per_chunk) == (True, (4, 2), (4, 2))
    assert World({"num_layers": 4, "pp": 2, "hybrid_layer_pattern": "*-*-"}).layers_per_chunk == (2, 2)
    assert (World({}).is_hybrid, World({}).layer_split) == (False, ())


@pytest.mark.parametrize(("experts", "pattern"), [(0, "*-*-"), (4, "*E*E")])
@pytest.mark.parametrize("depths", [0, 1])
def test_a_hybrid_of_the_same_layers_has_the_size_of_a_gpt(experts, pattern, depths):
    prediction = pattern[:2]
    values = SIZES | {"num_experts": experts, "mtp_num_layers": depths}
    gpt = shape_of_world(World(values | {"num_layers": 2}))
    text = pattern + f"/{prediction}" * depths
    hybrid = shape_of_world(World(values | {"num_layers": 4, "hybrid_layer_pattern": text}))
    assert parameters(hybrid) == parameters(gpt)
    assert forward_flops(hybrid) == forward_flops(gpt)
    assert hybrid.counts == gpt.counts == LayerCounts(2, 2 if not experts else 0, 2 if experts else 0)
    more = replace(hybrid, single_layers=LayerCounts(3, *hybrid.counts[1:]))
    assert forward_flops(more) > forward_flops(hybrid)


def test_the_size_of_mamba_is_not_known():
    with pytest.raises(UnknownValue):
        shape_of_world(World(SIZES | {"num_layers": 2, "hybrid_layer_pattern": "M-"}))


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("*-*-", 2),
        ("*E|*E", 2),
        ("+-+-", 2),
        ("**--", 0),
        ("-*-*", 0),
        ("*-*E", 0),
        ("*-*", 0),
        ("*-M-", 0),
        ("*-/*-", 0),
        ("", 0),
    ],
)
def test_a_transformer_has_attention_and_one_kind_of_mlp_in_turn(text, layers):
    assert pattern_of(text).transformer_layers == layers


@pytest.mark.parametrize(
    ("text", "chunks", "made"),
    [
        ("*-*-*-*-", 4, "*-|*-|*-|*-"),
        ("*-*-/*-", 2, "*-|*-/*-"),
        ("*-*-", 1, "*-*-"),
        ("*-*-", 3, "*-*-"),
        ("*-*|-", 4, "*-*|-"),
    ],
)
def test_a_pattern_without_segments_gets_equal_ones(text, chunks, made):
    assert segmented(text, chunks) == made
