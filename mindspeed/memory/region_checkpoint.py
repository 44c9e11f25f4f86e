"""Megatron's checkpoint without output as a region that keeps its graph, and the norms of layers that it recomputes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch import Tensor

from mindspeed.memory.model_layers import model_region
from mindspeed.memory.region import Region, RegionPass

_REGION: Final = "recompute_region"


def make_region(function: Any, owner: str, module: str) -> Region:
    """Let a function or a module be a region wherever Megatron checkpoints it, and return the region."""
    region: Region = getattr(function, _REGION, None) or model_region(owner, module)
    setattr(function, _REGION, region)
    return region


class RegionCheckpoint:
    """Mixin of ``CheckpointWithoutOutput``: the checkpointed function has a region, or is left to Megatron."""

    _pass: RegionPass | None = None
    _output: Tensor | None = None

    def checkpoint(self, run_function: Callable[..., Any], *args: Any) -> Any:
        """Compute the function of ``args`` in its region."""
        region: Region | None = getattr(run_function, _REGION, None)
        if region is None:
            return super().checkpoint(run_function, *args)  # type: ignore[misc]
        with region.entered(run_function, *args) as self._pass:
            self._output = run_function(*args)
        return self._output

    def discard_output_and_register_recompute(self, hook_tensor: Tensor) -> None:
        """Park what the function saved and returned until the gradient of ``hook_tensor`` arrives."""
        pass_, output = self._pass, self._output
        if pass_ is None or output is None:
            super().discard_output_and_register_recompute(hook_tensor)  # type: ignore[misc]
            return
        self._pass = self._output = None  # the layer keeps this object, and a tensor would keep its graph
        pass_.park_after(hook_tensor, output)


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
