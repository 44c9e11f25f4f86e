import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.torch_norm import L2Norm, WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from mindspeed.features.rms_norm.layers import FullPrecisionRMSNorm, RMSNorm, with_operator_norms


def config(**values):
    defaults = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "normalization": "RMSNorm"}
    return TransformerConfig(**defaults | values)


def block_of(layer, count=2):
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=WrappedTorchNorm)


def norms(layer):
    attention = layer.submodules.self_attention.submodules
    return [
        layer.submodules.input_layernorm,
        layer.submodules.pre_mlp_layernorm,
        attention.q_layernorm,
        getattr(attention, "k_layernorm", None) or attention.kv_layernorm,
    ]


def test_every_norm_of_a_block_is_exchanged_and_the_given_spec_is_not():
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=True)
    given = block_of(layer)
    changed = with_operator_norms(given)
    assert changed.layer_norm is RMSNorm
    assert norms(changed.layer_specs[0]) == [RMSNorm] * 4
    assert changed.layer_specs[0] is changed.layer_specs[1]
    assert given.layer_norm is WrappedTorchNorm
    assert norms(layer) == [WrappedTorchNorm] * 4


def test_what_is_no_rms_norm_stays():
    plain = with_operator_norms(block_of(get_gpt_layer_local_spec(normalization="RMSNorm")))
    assert norms(plain.layer_specs[0]) == [RMSNorm, RMSNorm, IdentityOp, IdentityOp]
    l2 = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=True, qk_l2_norm=True)
    assert norms(with_operator_norms(block_of(l2)).layer_specs[0]) == [RMSNorm, RMSNorm, L2Norm, L2Norm]


def test_norms_of_moe_and_latent_attention_layers_are_exchanged():
    moe = get_gpt_layer_local_spec(normalization="RMSNorm", num_experts=2)
    latent = get_gpt_layer_local_spec(normalization="RMSNorm", multi_latent_attention=True, qk_layernorm=True)
    changed = with_operator_norms(TransformerBlockSubmodules([moe, latent], WrappedTorchNorm))
    assert norms(changed.layer_specs[0]) == [RMSNorm, RMSNorm, IdentityOp, IdentityOp]
    assert norms(changed.layer_specs[1]) == [RMSNorm] * 4
    assert changed.layer_specs[0].submodules.mlp is moe.submodules.mlp


def test_weights_in_fp32_stay_so_when_the_model_is_converted():
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=True)
    changed = with_operator_norms(block_of(layer), weights_in_fp32=True)
    assert norms(changed.layer_specs[0]) == [FullPrecisionRMSNorm] * 4
    norm = FullPrecisionRMSNorm(config(params_dtype=torch.bfloat16, sequence_parallel=False), 16, eps=1e-3).bfloat16()
    assert norm.weight.dtype == torch.float32
    assert norm.weight.sequence_parallel is False
    with torch.no_grad():
        norm.weight.copy_(torch.randn(16))
    x = torch.randn(3, 16, dtype=torch.bfloat16, requires_grad=True)
    y = norm(x)
    expected = torch.nn.functional.rms_norm(x.detach().float(), (16,), norm.weight, 1e-3).bfloat16()
    torch.testing.assert_close(y, expected)
    y.sum().backward()
    assert (norm.weight.grad.dtype, x.grad.dtype) == (torch.float32, torch.bfloat16)


def test_the_module_is_torchs_rms_norm_with_the_same_parameter_name():
    ours, theirs = RMSNorm(config(), 16, eps=1e-3), torch.nn.RMSNorm(16, eps=1e-3)
    with torch.no_grad():
        theirs.weight.copy_(torch.randn(16))
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 2, 16)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-6, atol=1e-6)


def test_the_weight_is_marked_for_megatrons_gradient_sum_under_sequence_parallelism():
    shared = config(tensor_model_parallel_size=2, sequence_parallel=True)
    assert RMSNorm(shared, 16).weight.sequence_parallel is True
    assert RMSNorm(config(), 16).weight.sequence_parallel is False


def test_the_weight_has_the_parameter_type_and_may_be_centered_at_zero():
    centered = RMSNorm(config(layernorm_zero_centered_gamma=True, params_dtype=torch.bfloat16), 16)
    assert centered.weight.dtype == torch.bfloat16
    assert not centered.weight.any()
    x = torch.randn(4, 16, dtype=torch.bfloat16)
    assert torch.equal(centered(x), RMSNorm(config(params_dtype=torch.bfloat16), 16)(x))
