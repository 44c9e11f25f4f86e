"""The norms of Megatron's layers as regions."""

from __future__ import annotations

from typing import Any

from mindspeed.memory.region import Region
from mindspeed.memory.region_checkpoint import make_region


def norms_of(layer: Any) -> dict[str, Any]:
    """Return the two norms of a layer; none where it lacks one, or one is part of a fused linear layer."""
    from megatron.core.transformer.identity_op import IdentityOp

    norms = {name: getattr(layer, name, None) for name in ("input_layernorm", "pre_mlp_layernorm")}
    return {} if any(isinstance(norm, IdentityOp | None) for norm in norms.values()) else norms


def recompute_norms(layer: Any, owner: str) -> list[Region]:
    """Let a layer recompute its norms; it keeps those that are part of a fused linear layer.

    Needs `RegionCheckpoint` as a mixin of Megatron's ``CheckpointWithoutOutput``.
    """
    if norms := norms_of(layer):
        layer.recompute_input_layernorm = layer.recompute_pre_mlp_layernorm = True
    return [make_region(norm, owner, f"layer {layer.layer_number} {name}") for name, norm in norms.items()]
