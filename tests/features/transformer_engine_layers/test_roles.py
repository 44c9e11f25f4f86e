"""The roles alone: names, attributes, options, what is returned and what waits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.functional import layer_norm, linear, rms_norm

import mindspeed
from mindspeed.problems import MindSpeedError
from tests.features.transformer_engine_layers.single_rank import single_rank

HIDDEN, WIDTH = 8, 12


@pytest.fixture(scope="module", autouse=True)
def _active() -> Iterator[None]:
    mindspeed.activate(mindspeed.plan(["transformer-engine-layers"], platform="cpu"))
    with single_rank():
        yield
    mindspeed.deactivate()


def config(**values: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    defaults = {"num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 2, "normalization": "RMSNorm"}
    late = {name: values.pop(name) for name in ("fp8", "delay_wgrad_compute") if name in values}
    made = TransformerConfig(**defaults | values)
    vars(made).update(late)  # Megatron asks for more than a layer has: a recipe, a schedule
    return made


def column(kind: str = "TELayerNormColumnParallelLinear", skip: bool = False, bias: bool = True, **values: Any) -> Any:
    from megatron.core.extensions import transformer_engine

    options = {"gather_output": False, "bias": bias, "skip_bias_add": skip, "is_expert": False}
    role = getattr(transformer_engine, kind)
    return role(HIDDEN, WIDTH, config=config(**values), init_method=torch.nn.init.xavier_uniform_, **options)


def test_modules_have_the_names_of_transformer_engines() -> None:
    layer = column()
    assert type(layer).__name__ == "TELayerNormColumnParallelLinear"
    assert list(layer.state_dict()) == ["layer_norm_weight", "weight", "bias", "_extra_state"]
    assert list(column(normalization="LayerNorm").state_dict())[:2] == ["layer_norm_weight", "layer_norm_bias"]
    assert (layer.in_features, layer.out_features, layer.tp_size, layer.parallel_mode) == (HIDDEN, WIDTH, 1, "column")
    assert layer._tp_group is not None
    assert layer.weight.partition_dim == 0
    assert layer.state_dict()["_extra_state"].numel() == 0


def test_norms_have_an_extra_state_and_load_without_one() -> None:
    from megatron.core.extensions.transformer_engine import TENorm

    norm = TENorm(config(persist_layer_norm=True), HIDDEN)
    assert (type(norm).__name__, list(norm.state_dict())) == ("RMSNorm", ["weight", "_extra_state"])
    norm.load_state_dict({"weight": torch.full((HIDDEN,), 2.0)})
    assert norm.weight[0] == 2
    centered = TENorm(config(layernorm_zero_centered_gamma=True, normalization="LayerNorm"), HIDDEN)
    x = torch.randn(3, HIDDEN)
    assert torch.equal(centered.weight, torch.zeros(HIDDEN))
    torch.testing.assert_close(centered(x), layer_norm(x, (HIDDEN,)))


def test_a_norm_is_made_by_the_interface_of_transformer_engine() -> None:
    from megatron.core.post_training.modelopt.layers import Norm
    from transformer_engine import pytorch

    norm = pytorch.RMSNorm(HIDDEN, eps=1e-3, zero_centered_gamma=True, params_dtype=torch.float64)
    x = torch.randn(3, HIDDEN, dtype=torch.float64)
    torch.testing.assert_close(norm(x), rms_norm(x, (HIDDEN,), eps=1e-3))
    with pytest.raises(MindSpeedError, match=r"RMSNorm does not support fused_residual: it follows the interface"):
        pytorch.RMSNorm(HIDDEN, fused_residual=True)
    made = Norm(config(normalization="LayerNorm", params_dtype=torch.float64), HIDDEN)
    torch.testing.assert_close(made(x), layer_norm(x, (HIDDEN,)))


@pytest.mark.parametrize("skip", [True, False])
def test_the_norm_is_returned_where_an_adapter_asks_for_it(skip: bool) -> None:
    layer, x = column(skip=skip), torch.randn(3, 2, HIDDEN)
    normalized = rms_norm(x, (HIDDEN,), layer.layer_norm_weight, 1e-5)
    output, bias = layer(x)
    expected = linear(normalized, layer.weight, None if skip else layer.bias)
    torch.testing.assert_close(output, expected)
    assert bias is (layer.bias if skip else None)
    layer.return_layernorm_output = True
    returned = layer(x)
    found = returned[2] if skip else returned[0][1]
    torch.testing.assert_close(found, normalized)
    assert len(returned) == (3 if skip else 2)


def test_a_frozen_weight_gets_no_gradient_and_the_input_does() -> None:
    layer, x = column(), torch.randn(3, 2, HIDDEN, requires_grad=True)
    layer.weight.requires_grad_(False)
    layer(x)[0].sum().backward()
    assert layer.weight.grad is None
    assert x.grad is not None
    assert layer.layer_norm_weight.grad is not None


@pytest.mark.parametrize("frozen", [True, False])
def test_the_normalized_input_is_kept_for_the_gradient_of_the_weight_alone(frozen: bool) -> None:
    layer, x = column(), torch.randn(3, 2, HIDDEN, requires_grad=True)
    layer.weight.requires_grad_(not frozen)
    torch.nn.init.uniform_(layer.layer_norm_weight, 2, 3)
    normalized = rms_norm(x, (HIDDEN,), layer.layer_norm_weight, 1e-5)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        layer(x)
    copies = {
        tensor.data_ptr()
        for tensor in kept
        if tensor.numel() == x.numel() and torch.allclose(tensor, normalized.view_as(tensor))
    }
    assert len(copies) == (0 if frozen else 1)


def test_weight_gradients_wait_for_backward_dw() -> None:
    delayed, plain = column(delay_wgrad_compute=True), column()
    plain.load_state_dict(delayed.state_dict())
    x = torch.randn(3, 2, HIDDEN, requires_grad=True)
    called: list[str] = []
    delayed.register_wgrad_accumulation_and_reduce_hooks(lambda: called.append("hook"))
    for _ in range(2):
        delayed(x)[0].square().sum().backward()
        plain(x)[0].square().sum().backward()
    assert delayed.weight.grad is None
    assert delayed.weight.skip_backward_post_hook
    delayed.backward_dw()
    torch.testing.assert_close(delayed.weight.grad, plain.weight.grad / 2)
    delayed.backward_dw()
    delayed.backward_dw()  # nothing waits
    torch.testing.assert_close(delayed.weight.grad, plain.weight.grad)
    torch.testing.assert_close(delayed.layer_norm_weight.grad, plain.layer_norm_weight.grad)
    assert called == ["hook", "hook"]


def test_weights_of_experts_are_parameters_of_their_own() -> None:
    from megatron.core.extensions.transformer_engine import TEColumnParallelGroupedLinear

    options = {"init_method": torch.nn.init.xavier_uniform_, "skip_bias_add": False, "is_expert": True}
    experts = TEColumnParallelGroupedLinear(3, HIDDEN, WIDTH, config=config(), bias=True, **options)
    names = ["weight0", "weight1", "weight2", "bias0", "bias1", "bias2", "_extra_state"]
    assert list(experts.state_dict()) == names
    x = torch.randn(5, HIDDEN)
    output, bias = experts(x, [2, 0, 3])
    expected = [linear(x[:2], experts.weight0, experts.bias0), linear(x[2:], experts.weight2, experts.bias2)]
    torch.testing.assert_close(output, torch.cat(expected))
    assert bias is None
    experts.load_state_dict({name: experts.state_dict()[name] for name in names[:6]} | {"_extra_state2": None})


def test_experts_are_initialized_also_before_random_states_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.extensions.transformer_engine import TEColumnParallelGroupedLinear
    from megatron.core.tensor_parallel import random

    monkeypatch.setattr(random, "_CUDA_RNG_STATE_TRACKER", random.CudaRNGStatesTracker())
    options = {"config": config(), "bias": False, "skip_bias_add": False, "is_expert": True}
    layer = TEColumnParallelGroupedLinear(1, HIDDEN, WIDTH, init_method=torch.nn.init.ones_, **options)
    assert torch.equal(layer.weight0, torch.ones(WIDTH, HIDDEN))
    assert layer.weight0.partition_dim == 0


def test_a_part_of_a_layer_is_recomputed_by_megatron() -> None:
    from megatron.core.tensor_parallel import CheckpointWithoutOutput

    x = torch.randn(3, HIDDEN, requires_grad=True)
    checkpoint = CheckpointWithoutOutput()
    inner = checkpoint.checkpoint(torch.tanh, x)
    output = inner * inner
    checkpoint.discard_output_and_register_recompute(output)
    output.sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.tanh() * (1 - x.tanh() ** 2))


def test_defaults_of_functions_that_were_bound_without_an_engine_are_the_roles() -> None:
    from inspect import signature

    from megatron.core.extensions.transformer_engine import TENorm
    from megatron.core.models.vision.clip_vit_model import CLIPViTModel

    assert signature(CLIPViTModel.__init__).parameters["ln_pre_impl"].default is TENorm


@pytest.mark.parametrize(
    ("given", "kind", "window"),
    [((10, 0), "causal", (10, 0)), (None, "causal", (-1, 0)), (None, "padding_causal", (-1, 0)), (None, "no_mask", (-1, -1))],
)
def test_attention_has_the_window_of_transformer_engine(given: Any, kind: str, window: tuple[int, int]) -> None:
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    attention = TEDotProductAttention(config(window_size=given), 1, AttnMaskType[kind], "self")
    assert attention.window_size == window


def test_a_window_with_one_side_is_refused() -> None:
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    with pytest.raises(MindSpeedError) as caught:
        TEDotProductAttention(config(window_size=11), 1, AttnMaskType.causal, "self")
    (problem,) = caught.value.problems
    text = "TEDotProductAttention needs two sides of window_size, but it is 11"
    assert (problem.code, problem.message) == ("MS338", f"transformer-engine-layers: {text}")


@pytest.mark.parametrize("window", [None, (3, 0)])
def test_packed_sequences_are_each_sequence_alone(window: tuple[int, int] | None) -> None:
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    settings = config(window_size=window, attention_dropout=0.0)
    attention = TEDotProductAttention(settings, 1, AttnMaskType.causal, "self")
    q, k, v = (torch.randn(9, 2, 4) for _ in range(3))
    lengths = torch.tensor([0, 4, 9], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=lengths, cu_seqlens_kv=lengths)
    whole = attention(q, k, v, None, AttnMaskType.causal, packed_seq_params=packed)
    for start, end in ((0, 4), (4, 9)):
        rows = (x[start:end, None] for x in (q, k, v))
        alone = attention(*rows, None, AttnMaskType.causal)
        torch.testing.assert_close(whole[start:end], alone[:, 0])


def test_a_bias_is_added_to_the_scores() -> None:
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    attention = TEDotProductAttention(config(attention_dropout=0.0), 1, AttnMaskType.causal, "self")
    q, k, v = (torch.randn(5, 1, 2, 4) for _ in range(3))
    plain = attention(q, k, v, None, AttnMaskType.causal)
    torch.testing.assert_close(attention(q, k, v, None, AttnMaskType.causal, torch.zeros(1, 2, 5, 5)), plain)
    first = torch.full((1, 2, 5, 5), -1e4)
    first[..., 0] = 0  # every query sees the first key alone
    found = attention(q, k, v, None, AttnMaskType.causal, first)
    torch.testing.assert_close(found, v[0].flatten(1).expand(5, 1, 8))


def test_a_learnable_softmax_offset_is_a_parameter_with_a_sharded_key() -> None:
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    settings = config(softmax_type="learnable", attention_dropout=0.0)
    attention = TEDotProductAttention(settings, 1, AttnMaskType.causal, "self")
    assert "softmax_offset" in attention.state_dict()
    assert "softmax_offset" in attention.sharded_state_dict(metadata={"dp_cp_group": None})
    assert TEDotProductAttention(config(), 1, AttnMaskType.causal, "self").sharded_state_dict() == {}


def test_the_groups_that_megatron_0_20_hands_to_a_layer_change_nothing() -> None:
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TELinear, TERowParallelLinear

    options = {"bias": True, "skip_bias_add": False, "is_expert": False, "init_method": torch.nn.init.zeros_}
    sides = {
        TEColumnParallelLinear: {"gather_output": False},
        TERowParallelLinear: {"input_is_parallel": True},
        TELinear: {"parallel_mode": "duplicated"},
    }
    for role, side in sides.items():
        layer = role(HIDDEN, WIDTH, config=config(), pg_collection=object(), **options, **side)
        assert layer.weight.shape == (WIDTH, HIDDEN)


def test_weights_that_further_ranks_share_are_refused() -> None:
    with pytest.raises(MindSpeedError) as caught:
        mindspeed.plan(["transformer-engine-layers"], platform="cpu", world={"weight_shards": 2})
    (problem,) = caught.value.problems
    assert (problem.code, problem.message, str(problem).splitlines()[-1]) == (
        "MS304",
        "transformer-engine-layers: weight_shards is 2, so Megatron (--tensor-parallel-num-weight-shards) splits the weights "
        "of each tensor-parallel rank again; only Transformer Engine's original layers support this",
        "  fix: --weight-shards 1",
    )


def test_an_option_of_a_newer_engine_is_named() -> None:
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

    options = {"gather_output": False, "bias": True, "skip_bias_add": False, "is_expert": False, "init_method": None}
    with pytest.raises(MindSpeedError) as caught:
        TEColumnParallelLinear(HIDDEN, WIDTH, config=config(), spin=1, **options)
    assert caught.value.problems[0].message == (
        "transformer-engine-layers: TEColumnParallelLinear does not support spin: it follows the interface of "
        "Transformer Engine 2.9.0"
    )
    with pytest.raises(MindSpeedError) as caught:
        column(fp8="hybrid")
    assert caught.value.problems[0].message == (
        "transformer-engine-layers: TELayerNormColumnParallelLinear does not support the fp8 recipe delayed"
    )


def test_the_stand_in_has_types_and_refuses_what_it_lacks() -> None:
    import transformer_engine
    from megatron.core import fp8_utils
    from megatron.core.models.gpt import gpt_layer_specs
    from transformer_engine import pytorch

    assert (transformer_engine.__version__, gpt_layer_specs.HAVE_TE, fp8_utils.HAVE_TE) == ("2.9.0", True, False)
    layer = column()
    assert isinstance(layer, pytorch.LayerNormLinear)
    assert not isinstance(layer, pytorch.Linear)
    assert isinstance(pytorch.ops.Sequential, type)  # Megatron-Bridge names it in an annotation
    with pytest.raises(MindSpeedError, match=r"transformer_engine\.pytorch\.Float8Tensor is not available"):
        pytorch.Float8Tensor()
    with pytest.raises(MindSpeedError, match=r"transformer_engine\.pytorch\.LayerNormMLP is not provided"):
        pytorch.LayerNormMLP(8, 8)


def test_the_stand_in_multiplies_in_fp8_by_the_recipe_of_megatron_alone() -> None:
    from transformer_engine.pytorch import fp8

    reason = "Transformer Engine is not installed"
    assert fp8.check_fp8_support() == fp8.check_mxfp8_support() == fp8.check_fp8_block_scaling_support() == (False, reason)
    assert fp8.FP8GlobalStateManager.is_fp8_enabled() is False
    with fp8.fp8_autocast(enabled=False):
        pass
    from mindspeed.features.transformer_engine_layers.mxfp8 import Mxfp8Recipe

    with fp8.fp8_autocast(fp8_recipe=Mxfp8Recipe()):
        assert fp8.FP8GlobalStateManager.get_fp8_recipe() == Mxfp8Recipe()
        with fp8.fp8_autocast(enabled=False):
            assert fp8.FP8GlobalStateManager.is_fp8_enabled() is False
    with pytest.raises(MindSpeedError, match=r"transformer_engine\.pytorch\.fp8\.fp8_autocast multiplies in fp8 only by"):
        fp8.fp8_autocast()


def test_fused_permutation_is_that_of_megatron_and_its_probabilities_too() -> None:
    from megatron.core.transformer.moe import moe_utils

    tokens, probs = torch.randn(6, HIDDEN, requires_grad=True), torch.rand(6, 4, requires_grad=True)
    chosen = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 1], [1, 1, 1, 0], [0, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 1]]).bool()
    results = []
    for fused in (True, False):
        rows, weights, order = moe_utils.permute(tokens, chosen, probs, num_out_tokens=9, fused=fused)
        plain = moe_utils.permute(tokens, chosen, num_out_tokens=9, fused=fused)[0]
        restored = moe_utils.unpermute(rows, order, tokens.shape, probs=probs, routing_map=chosen, fused=fused)
        unweighed = moe_utils.unpermute(rows * weights[:, None], order, tokens.shape, fused=fused)
        sizes, order = torch.tensor([2, 3, 4]), torch.tensor([2, 0, 1])
        chunks = moe_utils.sort_chunks_by_idxs(rows, sizes, order, probs=weights, fused=fused)
        chunk = moe_utils.sort_chunks_by_idxs(rows, sizes, order, fused=fused)[0]
        gradients = torch.autograd.grad((restored * unweighed).sum(), (tokens, probs))
        results.append((rows, weights, plain, restored, unweighed, *chunks, chunk, *gradients))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_fused_routing_is_that_of_megatron(score_function: str) -> None:
    from megatron.core.transformer.moe import moe_utils

    logits, counts = torch.randn(6, 4), torch.tensor([3, 4, 2, 3])
    options = {"topk": 2, "score_function": score_function, "scaling_factor": 2.0}
    results = []
    for fused in (True, False):
        routed = moe_utils.topk_routing_with_score_function(logits, fused=fused, **options)
        scored = moe_utils.compute_routing_scores_for_aux_loss(logits, 2, score_function, fused=fused)
        loss = moe_utils.switch_load_balancing_loss_func(logits.softmax(1), counts, 6, 2, 4, 0.5, fused=fused)
        results.append((*routed, *scored, loss))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_fused_rotary_embedding_is_that_of_megatron(packed: bool, interleaved: bool) -> None:
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.parallel_state import get_context_parallel_group

    x, angles = (
        (torch.randn(9, 2, 4), torch.randn(5, 1, 1, 4)) if packed else (torch.randn(9, 2, 2, 4), torch.randn(9, 1, 1, 4))
    )
    lengths = torch.tensor([0, 4, 9], dtype=torch.int32) if packed else None
    results = [
        rope_utils.apply_rotary_pos_emb(
            x,
            angles,
            config(apply_rope_fusion=fused, rotary_interleaved=interleaved and not packed),
            cu_seqlens=lengths,
            cp_group=get_context_parallel_group(),
        )
        for fused in (True, False)
    ]
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("kernel", [False, True])
def test_options_whose_kernels_are_missing_are_computed_by_megatron(kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    monkeypatch.setattr(layers, "_grad_accum_fusion_available", kernel)
    made = config(gradient_accumulation_fusion=True, apply_rope_fusion=True, moe_permute_fusion=True)
    assert (made.gradient_accumulation_fusion, made.apply_rope_fusion, made.moe_permute_fusion) == (kernel, True, True)
    sizes = {"num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 2}
    assert not MLATransformerConfig(
        **sizes, multi_latent_attention=True, rope_type="yarn", apply_rope_fusion=True
    ).apply_rope_fusion


def test_the_fused_cross_entropy_is_that_of_megatron() -> None:
    from megatron.core.models.common.language_module import language_module

    assert language_module.te_parallel_cross_entropy.__module__ == "mindspeed.features.transformer_engine_layers.functions"


@pytest.mark.parametrize(("experts", "fused"), [(None, True), (4, False)])
def test_experts_have_no_fused_operations(experts: int | None, fused: bool) -> None:
    from mindspeed.features.transformer_engine_layers.fused import without_kernels

    made = config(num_moe_experts=experts)
    made.use_transformer_engine_op_fuser = True  # a field since Megatron 0.18
    without_kernels(made)
    assert made.use_transformer_engine_op_fuser is fused


def test_fsdp2_shards_the_layers_and_computes_the_same() -> None:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.torch_fully_sharded_data_parallel import TorchFullyShardedDataParallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.transformer.transformer_layer import TransformerLayer

    made = config(transformer_impl="transformer_engine", hidden_dropout=0, attention_dropout=0)
    layer = TransformerLayer(made, get_gpt_layer_with_transformer_engine_spec().submodules)
    x = torch.randn(4, 1, HIDDEN)
    expected = layer(x)[0]
    sharded = TorchFullyShardedDataParallel(made, DistributedDataParallelConfig(), torch.nn.Sequential(layer))
    found = sharded(x)[0]
    assert torch.equal(found, expected)
    found.sum().backward()
    assert all(type(parameter.grad).__name__ == "DTensor" for parameter in sharded.module.parameters())
