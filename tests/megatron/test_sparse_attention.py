"""Sparse attention (DSA) in releases whose layers lack it, and without the package of its Hadamard transform."""

from typing import Any

import pytest
import torch

import mindspeed
from mindspeed.workbench.verification.pool import WorkerPool

TOKENS, HIDDEN = 12, 32


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("size", [1, 8, 12, 64])
def test_the_transform_is_a_product_with_the_hadamard_matrix(size):
    from mindspeed.megatron.fixes.attention import hadamard_transform

    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    x = torch.randn(3, 2, size, requires_grad=True)
    y = hadamard_transform(x, 0.5)
    torch.testing.assert_close(y, 0.5 * x @ matrix[:size, :size])
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient, 0.5 * matrix[:size, :size].sum(0).expand_as(x))


def attentions(topk: int) -> tuple[float, float, list[str]]:
    """Return the largest differences of sparse and of dense attention with equal weights: outputs and input gradients.

    The names are those of the modules that sparse attention adds.
    """
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    model_parallel_cuda_manual_seed(1)
    sizes = {"num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16}
    heads = {"qk_head_dim": 8, "qk_pos_emb_head_dim": 8, "v_head_dim": 16, "rope_type": "rope", "qk_layernorm": True}
    indexer = {"dsa_indexer_n_heads": 2, "dsa_indexer_head_dim": 16, "dsa_indexer_topk": topk, "dsa_indexer_loss_coeff": 0.0}
    made = {"params_dtype": torch.bfloat16, "bf16": True, "add_bias_linear": False, "normalization": "RMSNorm"}
    options = {**sizes, **heads, **indexer, **made, "apply_rope_fusion": False, "attention_dropout": 0.0}
    config = MLATransformerConfig(**options, experimental_attention_variant="dsa", transformer_impl="transformer_engine")
    layer = get_gpt_layer_with_transformer_engine_spec(multi_latent_attention=True, qk_layernorm=True)
    dense = build_module(layer.submodules.self_attention, config=MLATransformerConfig(**options), layer_number=1)
    sparse = build_module(specs.get_experimental_attention_variant_module_spec(config), config=config, layer_number=1)
    missing, _ = sparse.load_state_dict(dense.state_dict(), strict=False)
    x = torch.randn(TOKENS, 2, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    mask = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool).triu(1)
    found = []
    for attention in (dense, sparse):
        y, _ = attention(x, mask)
        (gradient,) = torch.autograd.grad(y.float().square().sum(), x)
        found.append((y.detach().float(), gradient.float()))
    (y, dy), (z, dz) = found
    names = {name.partition("indexer.")[2].partition(".")[0] for name in missing if "_extra_state" not in name}
    return float((y - z).abs().max() / y.abs().max()), float((dy - dz).abs().max() / dy.abs().max()), sorted(names)


@pytest.mark.parametrize(("topk", "equal"), [(TOKENS, True), (2, False)])
def test_attention_to_all_keys_is_dense_attention(pool: WorkerPool, topk: int, equal: bool) -> Any:
    plan = mindspeed.plan(features=["transformer-engine-layers"], platform="cpu", world={"world_size": 1})
    [(outputs, gradients, names)] = pool.call(attentions, 1, topk, plan=plan)
    assert names == ["k_norm", "linear_weights_proj", "linear_wk", "linear_wq_b"]
    assert (outputs < 0.02, gradients < 0.04) == (equal, equal)
