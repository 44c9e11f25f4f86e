"""The norm module that layers are built with, and its place in Megatron's specs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed.megatron.module_specs import with_modules
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


class FullPrecisionRMSNorm(RMSNorm):
    """`RMSNorm` whose weight is kept in fp32 when the model is converted to 16 bits."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(config, hidden_size, eps)
        self.weight.data = self.weight.data.float()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return super()._apply(lambda tensor: fn(tensor).to(tensor.dtype), recurse)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        """``x`` is [..., hidden_size]."""
        return super().forward(x.float()).to(x.dtype)


def operator_norm(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    """Replace `mindspeed.features.transformer_engine_layers.modules.rms_norm`."""
    return rms_norm(x, gamma, epsilon)


def with_operator_norms(spec: Any, weights_in_fp32: bool = False) -> Any:
    """Return the spec of a block with every local norm of Megatron's exchanged for `RMSNorm`."""
    return with_modules(spec, dict.fromkeys(_norms(), FullPrecisionRMSNorm if weights_in_fp32 else RMSNorm))


def _norms() -> list[type]:
    from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    return [FusedLayerNorm, WrappedTorchNorm]
