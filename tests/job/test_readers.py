"""Megatron-LM's arguments and a configuration that is built from them give the same world."""

import dataclasses
from types import SimpleNamespace

import pytest

from mindspeed.engine.inspection.cli_arguments import surface
from mindspeed.job.config import world_of_config
from mindspeed.job.fields import FIELDS
from mindspeed.job.megatron_arguments import world_of
from mindspeed.job.world import World

BUILT = [name for name, field in FIELDS.items() if field.arguments and field.built_names]
MODEL = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64, "kv_channels": 8}
MOE = {"num_experts": 4, "moe_ffn_hidden_size": 16, "moe_router_topk": 2, "add_bias_linear": False, "moe_grouped_gemm": True}
MADE_BY_CONFIGURATIONS = {"expert_tensor_size"}
"""What a configuration fills in where no argument says it."""
CASES = {
    "plain": {},
    "llama": {"swiglu": True, "normalization": "RMSNorm", "group_query_attention": True, "num_query_groups": 2, "bf16": True},
    "layout": {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2, "bf16": True},
    "first stage": {"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 1, "bf16": True},
    "experts": MOE | {"moe_token_dispatcher_type": "alltoall", "moe_expert_capacity_factor": 1.5},
    "padded experts": MOE | {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
    "shared experts": MOE
    | {"moe_shared_expert_intermediate_size": 48, "moe_token_dispatcher_type": "alltoall", "moe_shared_expert_overlap": True},
    "router": MOE | {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_dtype": "fp64"},
    "sinkhorn": MOE | {"moe_router_load_balancing_type": "sinkhorn", "moe_router_topk": 1},
    "some dense layers": MOE | {"moe_layer_freq": [0, 1, 1, 1]},
    "full recompute": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "selective recompute": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
    "offloading": {"cpu_offloading_num_layers": 2},
    "window": {"window_size": (4, 0), "softmax_type": "off-by-one", "qk_layernorm": True, "add_qkv_bias": True},
    "fp8": {"fp8": "hybrid", "fp8_param_gather": True},
    "graphs": {"cuda_graph_impl": "local"},
    "clamped": {"swiglu": True, "activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0},
    "sequence parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "bf16": True},
}


@pytest.mark.parametrize("case", CASES)
def test_arguments_and_the_configuration_made_of_them_are_one_world(case):
    args = {name: rows[0].default for name, rows in surface("0.16.1").by_dest.items()} | MODEL | CASES[case]
    of_arguments = World({name: value for name, (value, _) in world_of(args).items()})
    of_config = World(world_of_config(configuration(args)))
    known = {name for name in BUILT if of_config.knows(name)}
    assert known - {name for name in BUILT if of_arguments.knows(name)} == MADE_BY_CONFIGURATIONS & known
    assert len(known) > 65
    for name in known - MADE_BY_CONFIGURATIONS:
        assert (name, getattr(of_config, name)) == (name, getattr(of_arguments, name))


def configuration(args):
    """A TransformerConfig of arguments, as ``core_transformer_config_from_args`` of Megatron-LM makes it."""
    import torch.nn.functional as F
    from megatron.core.activations import squared_relu
    from megatron.core.transformer import TransformerConfig

    names = {field.name for field in dataclasses.fields(TransformerConfig)}
    values = {name: value for name, value in args.items() if name in names and value is not None}
    values |= {
        "num_moe_experts": args["num_experts"],
        "fp8_param": args["fp8_param_gather"],
        "virtual_pipeline_model_parallel_size": args["num_virtual_stages_per_pipeline_rank"],
        "num_layers_in_first_pipeline_stage": args["decoder_first_pipeline_num_layers"],
        "num_layers_in_last_pipeline_stage": args["decoder_last_pipeline_num_layers"],
        "cpu_offloading": args["cpu_offloading_num_layers"] > 0,
        "num_query_groups": args["num_query_groups"] if args["group_query_attention"] else None,
        "pipeline_dtype": "bf16",
        "gated_linear_unit": args["swiglu"],
        "activation_func": F.silu if args["swiglu"] else squared_relu if args["squared_relu"] else F.gelu,
        "bias_activation_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
    }
    return TransformerConfig(**values)


def test_a_field_that_an_older_megatron_lacks_is_not_given_and_has_its_default():
    world = world_of_config(SimpleNamespace(num_layers=2, fp8=None))
    assert world == {"num_layers": 2, "low_precision": False, "low_precision_recipe": "none"}
    assert World(world).fine_grained_offloading is False


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if field.has_default and field.arguments])
def test_a_default_is_that_of_every_release(name):
    field = FIELDS[name]
    for version in ("0.14.0", "0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.1", "0.20.0"):
        defaults = {dest: rows[0].default for dest, rows in surface(version).by_dest.items()}
        assert field.of_arguments(defaults) in (None, field.default)


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if field.arguments])
def test_a_field_says_since_which_release_megatron_has_its_argument(name):
    fact, releases = FIELDS[name], ("0.14.0", "0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.1", "0.20.0")
    has = [version for version in releases if not surface(version).by_dest.keys().isdisjoint(fact.arguments)]
    first = "" if has[:1] == ["0.14.0"] or not has else has[0].rpartition(".")[0]
    assert fact.since == first


def test_a_field_that_nobody_gave_is_unknown_or_megatrons_default():
    world = World({"num_layers": 2})
    assert (world.knows("hidden_size"), world.knows("cuda_graphs"), world.cuda_graphs) == (False, True, False)
    assert world.known() == {"tp": 1, "pp": 1, "vpp": 1, "cp": 1, "ep": 1, "num_layers": 2}


@pytest.mark.parametrize(
    ("frequency", "layers"),
    [
        ("[0]*1+[1]*2", 2),
        ("([0]*3 + [1]*1)", 1),
        ("[0, 1]*2", 2),
        ("([1]*3+[0]*1)*3", 9),
        ("2", 2),
        ("f(4)", None),
        ("[1", None),
        ("[1]+2", None),
        (1, None),
    ],
)
def test_layers_with_experts_are_counted_in_the_expression_of_a_command_line(frequency, layers):
    values = {"moe_layer_freq": frequency, "num_layers": 4, "num_experts": 8}
    assert world_of(values).get("moe_layers", (None,))[0] == layers


@pytest.mark.parametrize(("argument", "ranks", "shards"), [(None, 2, 1), (2, 2, 1), (4, 2, 2), (2, 1, 2)])
def test_shares_of_a_weight_are_counted_beside_tensor_parallelism(argument, ranks, shards):
    """Megatron 0.19 sets the argument to the tensor-parallel size where no command gives it."""
    field = FIELDS["weight_shards"]
    assert field.of_arguments({"tensor_parallel_num_weight_shards": argument, "tensor_model_parallel_size": ranks}) == shards
    built = {"tensor_parallel_num_weight_shards": ranks * shards, "gtp_weight_remat_size": shards}
    assert field.of_attributes(built | {"tensor_model_parallel_size": ranks}) == shards
