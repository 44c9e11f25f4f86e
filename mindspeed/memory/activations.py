"""Megatron's MLP whose activation is a region, computed by Megatron's forward without both linear layers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from torch.nn import Module

from mindspeed.memory.model_layers import model_region
from mindspeed.memory.region import Region, RegionPass
from mindspeed.memory.region_checkpoint import make_region

_REGION = "recompute_region"
LinearForward = Callable[[Tensor], tuple[Tensor, Tensor | None]]
Forward = Callable[..., tuple[Tensor, Tensor | None]]


def has_own_activation(layer: Any) -> bool:
    """Return whether the MLP of a layer, or its experts, compute the activation as a function apart."""
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.moe.moe_layer import MoELayer

    mlp = getattr(layer, "mlp", None)
    if not isinstance(mlp, MoELayer):
        return isinstance(mlp, MLP)
    experts = mlp.experts
    return not _are_grouped(experts) or all(
        hasattr(experts, name) for name in ("activation_recompute", "activation_func_with_probs")
    )


def _are_grouped(experts: Any) -> bool:
    from megatron.core.transformer.moe.experts import SequentialMLP

    return not isinstance(experts, SequentialMLP)


def recompute_activations(layer: Any, owner: str) -> list[Region]:
    """Let the MLP of a layer, or its experts and shared experts, recompute their activation.

    Parts that compute their activation by other means, such as inside a grouped product, keep it. Needs `with_region` around
    ``MLP.forward`` and, for grouped experts, `RegionCheckpoint` as a mixin of Megatron's ``CheckpointWithoutOutput``.
    """
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.moe.moe_layer import MoELayer

    regions: list[Region] = []
    if not isinstance(mlp := getattr(layer, "mlp", None), Module):
        return regions
    if isinstance(mlp, MoELayer) and _are_grouped(experts := mlp.experts) and has_own_activation(layer):
        experts.activation_recompute = True
        regions.append(make_region(experts.activation_func_with_probs, owner, f"layer {layer.layer_number} experts"))
    for name, part in mlp.named_modules(prefix="mlp"):
        if isinstance(part, MLP):
            setattr(part, _REGION, region := model_region(owner, f"layer {layer.layer_number} {name}"))
            regions.append(region)
    return regions


def with_region(original: Forward) -> Forward:
    """Around ``MLP.forward``: park the activation's output and what it saved as soon as the second linear layer has run."""

    @functools.wraps(original)
    def forward(
        self: Any, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        region: Region | None = self.__dict__.get(_REGION)
        if region is None:
            return original(self, hidden_states, per_token_scale, **kwargs)

        def activation(given: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
            alone = MLPWith(self, lambda _: (given, bias), lambda activated: (activated, None))
            return original(alone, given, scale, **kwargs)[0]

        passes: list[RegionPass] = []

        def linear_fc1(hidden: Tensor) -> tuple[Tensor, Tensor | None]:
            given, bias = self.linear_fc1(hidden)
            passes.append(inside.enter_context(region.entered(activation, given, bias, per_token_scale)))
            return given, bias

        def linear_fc2(activated: Tensor) -> tuple[Tensor, Tensor | None]:
            inside.close()
            output, bias = self.linear_fc2(activated)
            passes.pop().park_after(output, activated)
            return output, bias

        with ExitStack() as inside:
            return original(MLPWith(self, linear_fc1, linear_fc2), hidden_states, per_token_scale, **kwargs)

    return forward


class MLPWith:
    """An MLP with other linear layers, as seen by its forward."""

    def __init__(self, mlp: Any, linear_fc1: LinearForward, linear_fc2: LinearForward) -> None:
        self._mlp = mlp
        self.linear_fc1 = _FunctionModule(linear_fc1)
        self.linear_fc2 = _FunctionModule(linear_fc2)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mlp, name)


class _FunctionModule(Module):
    """A function that passes for a module, which Megatron asks for since 0.17; without the state of one."""

    function: LinearForward

    def __init__(self, function: LinearForward) -> None:
        object.__setattr__(self, "function", function)

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.function(hidden)
