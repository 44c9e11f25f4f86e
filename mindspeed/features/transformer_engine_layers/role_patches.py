"""The names of Megatron's that get a role, as data. Light."""

from __future__ import annotations

from typing import Final

from mindspeed.plugins import Patch, Ref, Replace, Set, When

_HERE: Final = "mindspeed.features.transformer_engine_layers"
_EXTENSION: Final = "megatron.core.extensions.transformer_engine"
_ROTARY: Final = "megatron.core.models.common.embeddings.rope_utils"
_FUSED_ROTARY: Final = ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd")
_ROLES: Final = {
    "norm": "TENorm",
    "linear": "TELinear TEColumnParallelLinear TERowParallelLinear",
    "norm_linear": "TELayerNormColumnParallelLinear",
    "attention": "TEDotProductAttention",
    "grouped": "TEGroupedLinear TEColumnParallelGroupedLinear TERowParallelGroupedLinear",
    "functions": "TEActivationOp TEFusedMLP TECudaRNGStatesTracker te_checkpoint te_parallel_cross_entropy",
    "fused": "fused_permute fused_permute_with_probs fused_unpermute fused_sort_chunks_by_index fused_moe_aux_loss "
    "fused_sort_chunks_by_index_with_probs fused_topk_with_score_function fused_compute_score_for_moe_aux_loss",
}
"""Names of Megatron's module for Transformer Engine, by the module that has the role."""


def role_patches() -> list[Patch]:
    """Return the patches that put each role in the place of Transformer Engine's."""
    reason = "provides Transformer Engine's class on top of Megatron's local layer"
    since = {"TEActivationOp": When(">=0.15")}
    patches: list[Patch] = [
        Set(f"{_EXTENSION}:{name}", Ref(f"{_HERE}.{module}:{name}"), reason, since.get(name), "build", optional=True)
        for module, names in _ROLES.items()
        for name in names.split()
    ]
    rotary = "provides the name of a fused kernel, which is missing without Transformer Engine"
    patches += [Set(f"{_ROTARY}:{name}", Ref(f"{_HERE}.fused:{name}"), rotary, optional=True) for name in _FUSED_ROTARY]
    version = "reports a version of Transformer Engine, which specs and configurations read"
    patches += [
        Replace(f"megatron.core.utils:{name}", f"{_HERE}.functions:{name}", version, phase="build", optional=True)
        for name in ("get_te_version", "is_te_min_version")
    ]
    return patches
