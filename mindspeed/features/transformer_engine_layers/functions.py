"""The smaller roles: activation, fused MLP, random states, checkpoint, cross entropy, the version, and what FSDP2 shards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from types import SimpleNamespace
from typing import Any, Final

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.mlp import MLP
from packaging.version import Version
from torch import Tensor
from torch.nn import functional

from mindspeed.features.transformer_engine_layers.interface import VERSION, refuse
from mindspeed.plugins.patches import Function, wrapper

_VERSION: Final = Version(VERSION)


class Activation(torch.nn.Module):
    """An activation function of Transformer Engine's operations; a gated one multiplies by the second half."""

    def __init__(self, function: Callable[[Tensor], Tensor], gated: bool) -> None:
        super().__init__()
        self.function, self.gated = function, gated

    def forward(self, x: Tensor) -> Tensor:
        """``x`` is [..., width], twice as wide where the activation is gated."""
        if not self.gated:
            return self.function(x)
        gate, up = x.chunk(2, dim=-1)
        return self.function(gate) * up


_FUNCTIONS: Final[dict[Any, Callable[[Tensor], Tensor]]] = {
    functional.gelu: partial(functional.gelu, approximate="tanh"),
    functional.silu: functional.silu,
    functional.relu: functional.relu,
}
"""Activation functions by those of a configuration; Transformer Engine's GELU is that with tanh."""


class TEActivationOp:
    """Makes the activation that a configuration names."""

    def __new__(cls, config: Any) -> Any:
        """Return the activation."""
        if config.activation_func not in _FUNCTIONS:
            name = getattr(config.activation_func, "__name__", config.activation_func)
            refuse("TEActivationOp", f"does not support the activation {name}", "set use_te_activation_func to False")
        return Activation(_FUNCTIONS[config.activation_func], config.gated_linear_unit)


class TEFusedMLP(MLP):  # type: ignore[misc]  # megatron has no types
    """Megatron's MLP in the role of the fused one: the same operations, one after another."""


class TECudaRNGStatesTracker(CudaRNGStatesTracker):  # type: ignore[misc]
    """Megatron's tracker of random states in the role of Transformer Engine's."""

    def __init__(self, is_inference_rng_tracker: bool = False) -> None:
        super().__init__()
        self.is_inference_rng_tracker = is_inference_rng_tracker


def te_checkpoint(
    forward_func: Callable[..., Any],
    distribute_saved_activations: bool,
    get_rng_state_tracker: Any,
    tp_group: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Recompute a function in backward, by Megatron's own checkpoint."""
    function = partial(forward_func, **kwargs) if kwargs else forward_func
    return tensor_parallel.checkpoint(function, distribute_saved_activations, *args)


def te_parallel_cross_entropy(logits: Tensor, labels: Tensor, tp_group: Any, is_cg_capturable: bool = False) -> Tensor:
    """Return the cross entropy of logits that are split over the vocabulary, by Megatron's own function."""
    loss: Tensor = tensor_parallel.vocab_parallel_cross_entropy(logits, labels)
    return loss


def get_te_version() -> Version:
    """Return the version of the interface that the roles have."""
    return _VERSION


def is_te_min_version(version: str, check_equality: bool = True) -> bool:
    """Return whether the interface of the roles is that of this version or a newer one."""
    return Version(version) <= _VERSION if check_equality else Version(version) < _VERSION


@wrapper
def shard_linear_layers_with_theirs(initialize: Function, *args: Any, **kwargs: Any) -> None:
    """``TorchFullyShardedDataParallel.__init__``: linear layers are sharded with their transformer layer, as local ones are.

    FSDP2 cannot shard a module within a sharded one, and the roles are subclasses of a class that Megatron has it shard.
    """
    bound = signature(initialize).bind(*args, **kwargs)
    bound.apply_defaults()
    sharded = bound.arguments["sub_modules_to_wrap"]
    bound.arguments["sub_modules_to_wrap"] = {kind for kind in sharded if kind is not tensor_parallel.ColumnParallelLinear}
    initialize(*bound.args, **bound.kwargs)


cpu_offload: Final = SimpleNamespace(CPUOffloadEnabled=False)
"""Transformer Engine's switch that tells its own operators that Megatron offloads activations."""


class Fp8Padding:
    """Role that adds rows to those of each expert; none here, because products in fp8 take any number of rows."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        self.num_gemms, self.align_size = num_gemms, align_size

    def __call__(self, x: Tensor, m_splits: list[int]) -> tuple[Tensor, list[int]]:
        """Return the rows and their numbers as they are."""
        return x, m_splits


class Fp8Unpadding(Fp8Padding):
    """Role that removes what `Fp8Padding` adds."""

    def __call__(self, x: Tensor, m_splits: list[int]) -> Tensor:  # type: ignore[override]  # as in Transformer Engine
        """Return the rows as they are."""
        return x
