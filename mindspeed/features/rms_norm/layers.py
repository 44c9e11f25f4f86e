"""The norm module that layers are built with, and its place in Megatron's specs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mindspeed.megatron.module_specs import with_modules, with_parts
from mindspeed.ops.rms_norm import rms_norm


class RMSNorm(torch.nn.Module):
    """RMSNorm over the last dimension; its only parameter is called ``weight``, as in the norms that it replaces.

    Built by a spec with ``config``, ``hidden_size`` and ``eps``. Under sequence parallelism each rank sees a share of
    the tokens, and the mark on the weight makes Megatron sum its gradient over the tensor-parallel ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = bool(config.layernorm_zero_centered_gamma)
        fill = torch.zeros if self.zero_centered else torch.ones
        self.weight = torch.nn.Parameter(fill(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """``x`` is [..., hidden_size]."""
        gamma = self.weight + 1 if self.zero_centered else self.weight
        return rms_norm(x, gamma, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}"


class KeepsTypes(torch.nn.Module):
    """Mixin of modules whose parameters keep their types when the model is converted to 16 bits."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return super()._apply(lambda tensor: fn(tensor).to(tensor.dtype), recurse)  # type: ignore[no-untyped-call]


class FullPrecision(KeepsTypes):
    """Mixin of norms that compute in fp32 and return the type of their input."""

    def forward(self, x: Tensor) -> Tensor:
        """``x`` is [..., hidden_size]."""
        normalized: Tensor = super().forward(x.float())
        return normalized.to(x.dtype)


class FullPrecisionRMSNorm(FullPrecision, RMSNorm):
    """`RMSNorm` with an fp32 weight."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(config, hidden_size, eps)
        self.weight.data = self.weight.data.float()


class FullPrecisionNormOfLinear(KeepsTypes):
    """Mixin of the role of a norm and a linear layer: the weight of the norm is fp32."""

    layer_norm_weight: Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.layer_norm_weight.data = self.layer_norm_weight.data.float()


@cache
def _both(mixin: type, part: type) -> type:
    """Return a class with the mixin and the names of ``part``."""
    return type(part.__name__, (mixin, part), {"__module__": part.__module__, "__qualname__": part.__qualname__})


def operator_norm(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    """Replace `mindspeed.tensor_parallel.norms.rms_norm`; a weight in fp32 has the norm computed in fp32."""
    return rms_norm(x.to(gamma.dtype), gamma, epsilon).to(x.dtype)


def with_operator_norms(spec: Any, weights_in_fp32: bool = False) -> Any:
    """Return the spec of a block with every local norm of Megatron's exchanged for `RMSNorm`."""
    return with_modules(spec, dict.fromkeys(_norms(), FullPrecisionRMSNorm if weights_in_fp32 else RMSNorm))


def with_full_precision_roles(spec: Any) -> Any:
    """Return the spec of a block whose layers in Transformer Engine's roles have norms with fp32 weights."""
    from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear, TENorm

    class FullPrecisionTENorm(TENorm):  # type: ignore[misc]  # megatron has no types
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            norm = super().__new__(cls, *args, **kwargs)
            for parameter in norm.parameters():
                parameter.data = parameter.data.float()
            kind: type = type(norm)
            norm.__class__ = _both(FullPrecision, kind)
            return norm

    def exchanged(name: str, part: Any) -> Any:
        if part is TENorm:
            return FullPrecisionTENorm
        if isinstance(part, type) and issubclass(part, TELayerNormColumnParallelLinear):
            return _both(FullPrecisionNormOfLinear, part)
        return part

    return with_parts(spec, exchanged)


def _norms() -> list[type]:
    from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    return [FusedLayerNorm, WrappedTorchNorm]
