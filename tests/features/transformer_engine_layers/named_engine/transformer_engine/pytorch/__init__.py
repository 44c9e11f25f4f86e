"""Modules with the parameters and extra states of Transformer Engine's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import layer_norm, linear, rms_norm, scaled_dot_product_attention

from . import distributed as distributed
from . import fp8 as fp8
from . import ops as ops


class _Module(torch.nn.Module):
    """Every module has an extra state, empty without fp8."""

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None: ...


def _weight(*shape: int, dtype: Any = None) -> Parameter:
    return Parameter(torch.empty(*shape, dtype=dtype).normal_(std=0.02))


class LayerNorm(_Module):
    def __init__(self, hidden_size: int, eps: float, zero_centered_gamma: bool = False, **options: Any) -> None:
        super().__init__()
        self.eps, self.offset = eps, int(zero_centered_gamma)
        self.weight = Parameter(torch.full((hidden_size,), 1.0 - self.offset))
        self.bias = Parameter(torch.zeros(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, x.shape[-1:], self.weight + self.offset, self.bias, self.eps)


class RMSNorm(_Module):
    def __init__(self, hidden_size: int, eps: float, zero_centered_gamma: bool = False, **options: Any) -> None:
        super().__init__()
        self.eps, self.offset = eps, int(zero_centered_gamma)
        self.weight = Parameter(torch.full((hidden_size,), 1.0 - self.offset))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, x.shape[-1:], self.weight + self.offset, self.eps)


class _Linear(_Module):
    def __init__(self, in_features: int, out_features: int, bias: bool, return_bias: bool, **options: Any) -> None:
        super().__init__()
        self.in_features, self.out_features, self.use_bias, self.return_bias = in_features, out_features, bias, return_bias
        self.parallel_mode, self.tp_size = options.get("parallel_mode"), options.get("tp_size", 1)
        if options.get("normalization"):
            self._add_norm(in_features, options)
        self.weight = _weight(out_features, in_features)
        self.bias = Parameter(torch.zeros(out_features)) if bias else torch.empty(0)

    def _add_norm(self, size: int, options: dict[str, Any]) -> None:
        self.normalization, self.eps = options["normalization"], options["eps"]
        self.layer_norm_weight = Parameter(torch.ones(size))
        self.layer_norm_bias = Parameter(torch.zeros(size)) if self.normalization == "LayerNorm" else None

    def forward(self, x: Tensor, is_first_microbatch: Any = None) -> Any:
        added = self.bias if self.use_bias and not self.return_bias else None
        output = linear(x, self.weight, added)
        return (output, self.bias) if self.return_bias else output


class Linear(_Linear): ...


class LayerNormLinear(_Linear):
    def forward(self, x: Tensor, is_first_microbatch: Any = None) -> Any:
        if self.layer_norm_bias is None:
            return super().forward(rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.eps))
        return super().forward(layer_norm(x, x.shape[-1:], self.layer_norm_weight, self.layer_norm_bias, self.eps))


class GroupedLinear(_Module):
    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, bias: bool, return_bias: bool, **options: Any
    ) -> None:
        super().__init__()
        self.num_gemms, self.use_bias, self.return_bias = num_gemms, bias, return_bias
        self.fp8 = self.fp8_calibration = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False}
        for at in range(num_gemms):
            self.register_parameter(f"weight{at}", _weight(out_features, in_features))
            if bias:
                self.register_parameter(f"bias{at}", Parameter(torch.zeros(out_features)))

    def forward(self, x: Tensor, m_splits: list[int], is_first_microbatch: Any = None) -> Tensor:
        parts = torch.split(x, [*m_splits])
        return torch.cat([linear(part, getattr(self, f"weight{at}")) for at, part in enumerate(parts)])


class DotProductAttention(_Module):
    def __init__(self, num_attention_heads: int, kv_channels: Any, **options: Any) -> None:
        super().__init__()
        if options.get("softmax_type") == "learnable":
            self.softmax_offset = Parameter(torch.zeros(num_attention_heads))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Tensor:
        """``query`` is [S, B, N, D]; the mask is causal."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        output = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return output.permute(2, 0, 1, 3).flatten(2)


class TransformerLayer(_Module): ...


class MultiheadAttention(_Module): ...
