"""Models of every kind, built and run by Megatron on one rank, for the arithmetic to be compared with."""

from dataclasses import asdict
from typing import Any, Final

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch.utils.flop_counter import FlopCounterMode

from mindspeed.job.arithmetic import shape_of_config

VOCABULARY, LENGTH, SAMPLES = 96, 16, 2
_BASE: Final[dict[str, Any]] = {"num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 48}
_LLAMA: Final = {"normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False}
_EXPERTS: Final = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24, "moe_layer_freq": [0, 1, 1]}
_LATENT: Final = {"q_lora_rank": 16, "kv_lora_rank": 12, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 10}
MODELS: Final[dict[str, dict[str, Any]]] = {
    "gpt": {"position": "learned_absolute", "tied": True},
    "gqa": {**_LLAMA, "num_query_groups": 2, "kv_channels": 12, "add_qkv_bias": True, "qk_layernorm": True},
    "mla": {
        **_LLAMA,
        **_LATENT,
        "qk_layernorm": True,
        "multi_latent_attention": True,
        "num_query_groups": 4,
        "rope_type": "rope",
    },
    "plain-query mla": {**_LLAMA, **_LATENT, "q_lora_rank": None, "multi_latent_attention": True, "rope_type": "rope"},
    "moe": {**_LLAMA, **_EXPERTS},
    "shared experts": {**_LLAMA, **_EXPERTS, "moe_shared_expert_intermediate_size": 40},
    "mtp": {**_LLAMA, "mtp_num_layers": 1, "num_query_groups": 2},
}


def measure() -> dict[str, tuple[dict[str, Any], int, int]]:
    """``{model: (its shape, parameters, counted operations of a step)}``; attention is Megatron's, which computes all pairs."""
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    try:
        return {name: _measure(**values) for name, values in MODELS.items()}
    finally:
        MTPLossLoggingHelper.tracker.clear()  # it holds process groups


def _measure(position: str = "rope", tied: bool = False, **values: Any) -> tuple[dict[str, Any], int, int]:
    latent = values.get("multi_latent_attention", False)
    config = (MLATransformerConfig if latent else TransformerConfig)(**_BASE, **values, masked_softmax_fusion=False)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
    mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if config.mtp_num_layers else None
    model = GPTModel(
        config,
        spec,
        VOCABULARY,
        LENGTH,
        share_embeddings_and_output_weights=tied,
        position_embedding_type=position,
        mtp_block_spec=mtp,
    ).cuda()
    tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH), device="cuda")
    positions = torch.arange(LENGTH, device="cuda").expand(SAMPLES, -1)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device="cuda").triu(1)
    with FlopCounterMode(display=False) as counter:
        model(tokens, positions, mask, labels=tokens).sum().backward()
    learned = LENGTH if position == "learned_absolute" else 0
    shape = shape_of_config(config, VOCABULARY, LENGTH, tied, learned, causal=False)
    return asdict(shape), sum(p.numel() for p in model.parameters()), counter.get_total_flops()
