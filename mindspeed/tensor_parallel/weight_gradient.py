"""The gradient of a weight as Megatron's linear layers hand it on: a new tensor, or added to the weight's buffer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor

from mindspeed.tensor_parallel.linear import WeightGradient, plain_weight_gradient


def adds_to_buffer(weight: Tensor, requested: bool) -> bool:
    """Return whether a weight's gradient is added to its ``main_grad``. A feature with a kernel for it wraps this function."""
    return requested


def weight_gradient(weight: Any, requested: bool) -> WeightGradient:
    """The function that makes a weight's gradient; ``requested`` is gradient_accumulation_fusion of the layer."""
    if not adds_to_buffer(weight, requested):
        return plain_weight_gradient
    main_grad = getattr(weight, "main_grad", None)

    def add(g_TN: Tensor, x_TK: Tensor) -> Tensor | None:
        weight.main_grad = main_grad
        return added_to_buffer(weight, g_TN, x_TK)

    return add


def added_to_buffer(weight: Any, g_TN: Tensor, x_TK: Tensor) -> Tensor | None:
    """Add to the buffer. Hooks of Megatron's data parallelism get a gradient without content and a mark, as from its layers."""
    if hasattr(weight, "__fsdp_param__"):
        weight.main_grad = weight.get_main_grad()
        torch.matmul(g_TN.t(), x_TK, out=weight.main_grad)
    else:
        # Megatron's own name, asked at each call: a feature may have put its kernels there
        kernels = layers.fused_weight_gradient_mlp_cuda
        wide = weight.main_grad.dtype == torch.float32
        kernel = kernels.wgrad_gemm_accum_fp32 if wide else kernels.wgrad_gemm_accum_fp16
        kernel(x_TK, g_TN, weight.main_grad)
    return _mark(weight, x_TK.dtype)


def handover(weight: Any, requested: bool) -> Callable[[Tensor], Tensor | None]:
    """Return the function that adds a computed gradient of a weight to its buffer, or gives it to autograd."""
    if not adds_to_buffer(weight, requested):
        return lambda gradient: gradient.to(weight.dtype)
    main_grad = getattr(weight, "main_grad", None)

    def add(gradient: Tensor) -> Tensor | None:
        weight.main_grad = main_grad
        weight.main_grad.add_(gradient)
        return _mark(weight, weight.dtype)

    return add


def _mark(weight: Any, dtype: torch.dtype) -> Tensor | None:
    """Mark a gradient as added to its buffer, and return what hooks get in its place."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    make = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
    return make(weight.main_grad.shape, dtype=dtype, device=weight.device)
