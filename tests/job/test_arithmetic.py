"""Arithmetic of models against the models themselves: parameters and counted operations, to the unit."""

from typing import Any

import pytest

from mindspeed import registry
from mindspeed.job.arithmetic import (
    LatentAttention,
    ModelShape,
    counts_per_chunk,
    forward_flops,
    layers_forward,
    layers_of_rank,
    logits_forward,
    model_flops,
    parameters,
    shape_of_world,
)
from mindspeed.plugins import UnknownValue, World
from mindspeed.workbench.training.config import train_config
from mindspeed.workbench.training.shape import trainer_layer
from mindspeed.workbench.verification.pool import WorkerPool
from tests.arithmetic_job import MODELS, SAMPLES, measure


@pytest.fixture(scope="module")
def measured(pool: WorkerPool) -> dict[str, tuple[dict[str, Any], int, int]]:
    (result,) = pool.call(measure, 1, plan=registry.plan(platform="cpu", level=0))
    return result


@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_operations_are_those_of_megatrons_model(name: str, measured: dict[str, Any]) -> None:
    values, count, operations = measured[name]
    latent = values.pop("latent")
    shape = ModelShape(**values, latent=LatentAttention(**latent) if latent else None)
    assert parameters(shape).total == count
    assert model_flops(shape, SAMPLES) == operations


def test_a_causal_mask_lets_attention_see_half_of_the_square_and_the_diagonal() -> None:
    shape = _shape()
    assert shape.pairs == 8 * 9 // 2


def test_experts_are_apart_from_what_tensor_parallel_ranks_share() -> None:
    found = parameters(_shape(num_experts=4, router_topk=2, moe_ffn_hidden_size=6))
    assert found.experts == 2 * 4 * 3 * 8 * 6
    assert found.replicated == 2 * (2 * 8 + 4 * 8) + 8


def test_a_world_of_multi_latent_attention_has_a_shape_when_its_widths_are_given() -> None:
    widths = {"kv_lora_rank": 3, "qk_head_dim": 4, "qk_pos_emb_head_dim": 2, "v_head_dim": 5}
    assert _shape(multi_latent_attention=True, **widths).latent == LatentAttention(0, 3, 4, 2, 5)
    with pytest.raises(UnknownValue) as error:
        _shape(multi_latent_attention=True, kv_lora_rank=3)
    assert error.value.fields == ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


def _shape(**values: Any) -> ModelShape:
    config, _ = train_config({})
    model = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 8, "ffn_hidden_size": 12}
    world = trainer_layer(config, [], "cpu", 64).world
    return shape_of_world(World({**world, "num_query_groups": 2, "kv_channels": 4, **model, **values}))


def test_the_dense_layers_of_a_mixed_model_come_first() -> None:
    sizes = {"num_layers": 8, "num_experts": 4, "world_size": 4, "pp": 4}
    assert counts_per_chunk(World(sizes | {"moe_layers": 5})) == ((2, 2, 0), (2, 1, 1), (2, 0, 2), (2, 0, 2))
    assert counts_per_chunk(World(sizes | {"moe_layers": 0})) == ((2, 2, 0),) * 4
    assert counts_per_chunk(World(sizes)) == ((2, 0, 2),) * 4


def test_the_stage_with_most_experts_has_as_many_layers_with_them_as_there_are() -> None:
    sizes = {
        "num_layers": 8,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "vocab_size": 32,
        "seq_length": 8,
        "ffn_hidden_size": 64,
        "gated_linear_unit": True,
        "world_size": 4,
        "num_experts": 4,
        "moe_layers": 5,
        "moe_ffn_hidden_size": 24,
    }
    world = World(sizes)
    shape = shape_of_world(world)
    whole = layers_of_rank(world, shape)
    assert whole == (8, 3, 5)
    assert layers_forward(shape, whole) == forward_flops(shape) - logits_forward(shape)
    assert layers_of_rank(World(sizes | {"pp": 2}), shape) == (4, 0, 4)
