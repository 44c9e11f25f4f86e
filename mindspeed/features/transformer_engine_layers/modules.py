"""Module classes with the names of ``transformer_engine.pytorch``, which other packages use with isinstance."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed.features.transformer_engine_layers.interface import refuse, refuse_unknown
from mindspeed.tensor_parallel import norms


class TransformerEngineBaseModule(torch.nn.Module):
    """Base of every module: it has an extra state, empty as that of Transformer Engine without fp8."""

    is_first_microbatch: bool

    def get_extra_state(self) -> Tensor:
        """Return an empty state; checkpoints of Transformer Engine have an entry for it."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Ignore a state: nothing here has one."""


def accept_missing_extra_state(module: torch.nn.Module) -> None:
    """Let a module load a checkpoint without its extra state."""
    module.register_load_state_dict_pre_hook(_add_extra_state)  # type: ignore[no-untyped-call]


def _add_extra_state(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    state_dict.setdefault(f"{prefix}_extra_state", None)


def norm_options(config: Any) -> dict[str, Any]:
    """Return the options of a norm that a configuration names."""
    return {
        "params_dtype": config.params_dtype,
        "device": "cpu" if config.use_cpu_initialization else torch.cuda.current_device(),
        "sequence_parallel": bool(config.sequence_parallel),
    }


def norm_parameter(
    size: int, fill: float, params_dtype: torch.dtype | None, device: Any, sequence_parallel: bool
) -> torch.nn.Parameter:
    """Make a parameter of a norm; under sequence parallelism its gradient is summed over tensor-parallel ranks."""
    parameter = torch.nn.Parameter(torch.full((size,), fill, dtype=params_dtype or torch.get_default_dtype(), device=device))
    parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
    return parameter


class _Norm(TransformerEngineBaseModule):
    """A norm over the last dimension, whose weight is an offset from 1 with ``zero_centered_gamma``."""

    has_bias = False
    config: Any = None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        device: Any = "cuda",
        **newer: Any,
    ) -> None:
        refuse_unknown(type(self).__name__, newer)
        super().__init__()
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.sequence_parallel = sequence_parallel
        options = {"params_dtype": params_dtype, "device": device, "sequence_parallel": sequence_parallel}
        self.weight = norm_parameter(hidden_size, 0.0 if zero_centered_gamma else 1.0, **options)
        if self.has_bias:
            self.bias = norm_parameter(hidden_size, 0.0, **options)
        accept_missing_extra_state(self)

    def reset_parameters(self) -> None:
        """Set the parameters to those of a norm that only normalizes."""
        with torch.no_grad():
            self.weight.fill_(0.0 if self.zero_centered_gamma else 1.0)
            if self.has_bias:
                self.bias.zero_()

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}"


class EngineRMSNorm(_Norm):
    """RMSNorm with the interface of Transformer Engine, whose name it has too."""

    def forward(self, x: Tensor) -> Tensor:
        """``x`` is [..., hidden size]."""
        return normalize(x, self.weight, None, self)


EngineRMSNorm.__name__ = EngineRMSNorm.__qualname__ = "RMSNorm"
RMSNorm = EngineRMSNorm


class LayerNorm(_Norm):
    """LayerNorm with the interface of Transformer Engine."""

    has_bias = True

    def forward(self, x: Tensor) -> Tensor:
        """``x`` is [..., hidden size]."""
        return normalize(x, self.weight, self.bias, self)


def normalize(x: Tensor, weight: Tensor, bias: Tensor | None, owner: Any) -> Tensor:
    """Apply the norm of a module that has ``eps`` and ``zero_centered_gamma``: LayerNorm with a bias, else RMSNorm."""
    gamma = weight + 1 if owner.zero_centered_gamma else weight
    if bias is None:
        return norms.rms_norm(x, gamma, owner.eps)
    return norms.layer_norm(x, gamma, bias, owner.eps)


class _Role(TransformerEngineBaseModule):
    """Base of modules that exist through Megatron's wrappers alone."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse(
            f"transformer_engine.pytorch.{type(self).__name__}",
            "is not provided: mindspeed provides only the layers that Megatron builds",
            "build the layer through megatron.core.extensions.transformer_engine, or install Transformer Engine",
        )


class Linear(_Role):
    """Type of linear layers."""


class LayerNormLinear(_Role):
    """Type of linear layers with a norm before them."""


class LayerNormMLP(_Role):
    """Type of whole MLPs, which Megatron does not build."""


class TransformerLayer(_Role):
    """Type of whole layers, which Megatron does not build."""


class MultiheadAttention(_Role):
    """Type of attention with its projections, which Megatron does not build."""


class GroupedLinear(_Role):
    """Type of the linear layers of several experts."""


class DotProductAttention(_Role):
    """Type of core attention."""
