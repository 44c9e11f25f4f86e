"""The tiny model is the one that was asked for, or is refused."""

import pytest

from mindspeed.job.fields import FIELDS
from mindspeed.job.world import PARALLEL_SIZES, World
from mindspeed.megatron.configuration import gpt_configuration
from mindspeed.workbench.verification.shape import GPT, MOE, Recipe, not_built, options_of, recipe_of

AROUND = ("world_size", "ranks_per_node", "platform", "megatron", "dtype", "micro_batch_size", "global_batch_size")


def other_value(name, shape):
    field, present = FIELDS[name], getattr(shape, name, None)
    if field.kind is bool:
        return not present
    if field.kind is tuple:
        return ("sinkhorn",)
    if field.kind is str:
        words = field.words or ("*-*-",)
        return next(word for word in words if word != present)
    return field.kind((present or field.least or 0) + 1)


@pytest.mark.parametrize("shape", [GPT, MOE], ids=lambda shape: shape.name)
def test_every_field_of_a_model_is_in_the_tiny_model_or_refused(shape):
    silent = []
    for name in FIELDS.keys() - {*AROUND, *PARALLEL_SIZES}:
        world = {name: other_value(name, shape)}
        if world[name] == FIELDS[name].default or not_built(world):
            continue
        changed = shape.changed(world).with_options(options_of(world))
        if changed == shape and "lora" not in name and "head_dim" not in name and name != "indexer_heads":
            silent.append(name)
    assert silent == []


def test_widths_that_are_given_are_those_of_the_configuration():
    asked = {"kv_channels": 24, "num_experts": 4, "moe_ffn_hidden_size": 96, "first_stage_layers": 1}
    shape = MOE.changed(asked).with_options(options_of(asked))
    values = gpt_configuration(World(Recipe(shape).world()), 0.0, **dict(shape.options)).values
    wanted = {"kv_channels": 24, "moe_ffn_hidden_size": 96, "num_layers_in_first_pipeline_stage": 1}
    assert {name: values[name] for name in wanted} == wanted


def test_the_recipe_of_a_job_has_the_widths_of_its_latent_attention():
    latent = {"q_lora_rank": 0, "kv_lora_rank": 64, "qk_head_dim": 32, "qk_pos_emb_head_dim": 16, "v_head_dim": 48}
    batch = {"dtype": "fp32", "micro_batch_size": 1, "global_batch_size": 8}
    recipe = recipe_of(World({"multi_latent_attention": True, **latent, **batch}))
    assert {name: recipe.world()[name] for name in latent} == latent


def test_the_recipe_of_a_job_has_the_indexer_of_its_sparse_attention():
    indexer = {"indexer_topk": 3, "indexer_heads": 5, "indexer_head_dim": 12}
    batch = {"dtype": "fp32", "micro_batch_size": 1, "global_batch_size": 8}
    recipe = recipe_of(World({"multi_latent_attention": True, **indexer, **batch}))
    assert {name: recipe.world()[name] for name in indexer} == indexer
