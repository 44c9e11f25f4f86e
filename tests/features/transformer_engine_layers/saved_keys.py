"""The keys, shapes and extra states that models save, by the layers that they are of."""

from __future__ import annotations

from typing import Any, Final

from torch.nn import functional

_LLAMA: Final[dict[str, Any]] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 48,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": functional.silu,
    "add_bias_linear": False,
    "use_cpu_initialization": True,
}
_GPT: Final = {
    "normalization": "LayerNorm",
    "gated_linear_unit": False,
    "activation_func": functional.gelu,
    "add_bias_linear": True,
    "num_query_groups": 4,
}
_MOE: Final = {"num_moe_experts": 4, "moe_ffn_hidden_size": 24, "moe_token_dispatcher_type": "alltoall"}
_GROUPED: Final = _MOE | {"moe_grouped_gemm": True}
_WIDTHS: Final = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
_LATENT: Final = {"multi_latent_attention": True, "num_query_groups": 4, **dict.fromkeys(_WIDTHS, 8)}
MODELS: Final[dict[str, dict[str, Any]]] = {
    "gpt": _GPT,
    "llama": {},
    "qk-norm": {"qk_layernorm": True},
    "sequential experts": _MOE,
    "grouped experts": _GROUPED,
    "shared experts": _GROUPED | {"moe_shared_expert_intermediate_size": 24},
    "dense and MoE layers": _MOE | {"moe_layer_freq": [0, 1]},
    "latent attention": _LATENT | {"qk_layernorm": True},
    "latent attention without norms": _LATENT,
    "multi-token prediction": {"mtp_num_layers": 1},
    "everything": _LATENT
    | _GROUPED
    | {"qk_layernorm": True, "moe_layer_freq": [0, 1], "mtp_num_layers": 1, "moe_shared_expert_intermediate_size": 24},
}
"""Values of a configuration above those of a tiny Llama."""


def build(name: str, engine: bool) -> Any:
    """Build one of the models of Transformer Engine's layers, or of local ones."""
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    values = _LLAMA | MODELS[name]
    latent = values.get("multi_latent_attention", False)
    grouped = engine and values.get("moe_grouped_gemm", False)  # local ones need grouped_gemm, and have the same keys
    config = (MLATransformerConfig if latent else TransformerConfig)(**values | {"moe_grouped_gemm": grouped})
    given = {"use_transformer_engine": engine, "normalization": config.normalization}
    kinds = (config.num_moe_experts, grouped, config.qk_layernorm, latent)
    if isinstance(config.moe_layer_freq, list):
        spec = specs.get_gpt_decoder_block_spec(config, **given)
    elif engine:
        spec = specs.get_gpt_layer_with_transformer_engine_spec(*kinds)
    else:
        spec = specs.get_gpt_layer_local_spec(*kinds, normalization=config.normalization)
    prediction = None
    if config.mtp_num_layers:
        last = spec.layer_specs[-1] if hasattr(spec, "layer_specs") else spec
        prediction = specs.get_gpt_mtp_block_spec(config, last, use_transformer_engine=engine)
    sizes = {"vocab_size": 64, "max_sequence_length": 16}
    options = {"position_embedding_type": "rope", "share_embeddings_and_output_weights": False}
    return GPTModel(config, spec, mtp_block_spec=prediction, **sizes, **options)


def saved(model: Any) -> dict[str, str]:
    """Return the shape of each tensor that a model saves, and the number of parts of each extra state."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state = model.sharded_state_dict(metadata=metadata)
    apply_factories(state)
    rows = {}
    for entry in nested_values(state):
        shape = " x ".join(map(str, entry.global_shape))
        rows[entry.key] = shape if isinstance(entry, ShardedTensor) else f"state of {shape}"
    return dict(sorted(rows.items()))
