"""The names of Megatron's that get a role, as data. Light."""

from __future__ import annotations

from typing import Final

from mindspeed import plugins as ms

_HERE: Final = "mindspeed.features.transformer_engine_layers"
_EXTENSION: Final = "megatron.core.extensions.transformer_engine"
_ROTARY: Final = "megatron.core.models.common.embeddings.rope_utils"
_FUSED_ROTARY: Final = ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd")
_ROLES: Final = (
    ("norm", "TENorm", "defines TENorm as a local LayerNorm or RMSNorm"),
    (
        "linear",
        "TELinear TEColumnParallelLinear TERowParallelLinear",
        "defines Transformer Engine's linear layers by Megatron's local linear layers",
    ),
    (
        "norm_linear",
        "TELayerNormColumnParallelLinear",
        "defines TELayerNormColumnParallelLinear by a norm and Megatron's local ColumnParallelLinear",
    ),
    ("attention", "TEDotProductAttention", "defines TEDotProductAttention by Megatron's local DotProductAttention"),
    (
        "grouped",
        "TEGroupedLinear TEColumnParallelGroupedLinear TERowParallelGroupedLinear",
        "defines Transformer Engine's grouped linear layers by one matrix product per local expert",
    ),
    ("functions", "TEActivationOp", "defines TEActivationOp by the activation functions of torch"),
    ("functions", "TEFusedMLP", "defines TEFusedMLP by Megatron's unfused MLP"),
    ("functions", "TECudaRNGStatesTracker", "defines TECudaRNGStatesTracker by Megatron's CudaRNGStatesTracker"),
    ("functions", "te_checkpoint", "recomputes activations by Megatron's own function"),
    ("functions", "cpu_offload", "accepts the switch that Megatron sets while it offloads activations"),
    ("functions", "te_parallel_cross_entropy", "computes the cross entropy by Megatron's own function"),
    (
        "fused",
        "fused_permute fused_permute_with_probs",
        "copies each token once per selected expert and sorts the copies by expert, with an operator of mindspeed",
    ),
    ("fused", "fused_unpermute", "sums the expert outputs of each token with an operator of mindspeed"),
    (
        "fused",
        "fused_sort_chunks_by_index fused_sort_chunks_by_index_with_probs",
        "reorders the tokens of experts by Megatron's unfused function",
    ),
    ("fused", "fused_topk_with_score_function", "selects experts by Megatron's unfused function"),
    (
        "fused",
        "fused_compute_score_for_moe_aux_loss fused_moe_aux_loss",
        "computes the load-balancing loss of experts by Megatron's unfused function",
    ),
)
"""Names of Megatron's module for Transformer Engine: the module that has the role, the names, and what they do here."""
_PURPOSE: Final = "so that layer specs for Transformer Engine work without Transformer Engine"


def role_patches() -> list[ms.Patch]:
    """Return the patches that put each role in the place of Transformer Engine's."""
    since = {"TEActivationOp": ms.When(">=0.15"), "cpu_offload": ms.When(">=0.16")}
    patches: list[ms.Patch] = [
        ms.Set(
            f"{_EXTENSION}:{name}",
            ms.Ref(f"{_HERE}.{module}:{name}"),
            f"{does}, {_PURPOSE}",
            since.get(name),
            "build",
            optional=True,
        )
        for module, names, does in _ROLES
        for name in names.split()
    ]
    rotary = f"applies rotary embedding by Megatron's unfused function, {_PURPOSE}"
    patches += [ms.Set(f"{_ROTARY}:{name}", ms.Ref(f"{_HERE}.fused:{name}"), rotary, optional=True) for name in _FUSED_ROTARY]
    version = "reports the version of Transformer Engine whose interface these layers have, because Megatron asks for it"
    patches += [
        ms.Replace(f"megatron.core.utils:{name}", f"{_HERE}.functions:{name}", version, phase="build", optional=True)
        for name in ("get_te_version", "is_te_min_version")
    ]
    return patches
