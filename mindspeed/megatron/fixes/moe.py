"""Mixture-of-experts helpers that assume Transformer Engine or a CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from mindspeed.megatron.fixes.layers import HAVE_ENGINE


class RouterGating(torch.autograd.Function):
    """``input @ weight.T + bias`` in the router's dtype; only the unconverted tensors are kept for backward."""

    @staticmethod
    def forward(ctx: Any, input_TH: Any, weight_EH: Any, bias_E: Any, dtype: torch.dtype) -> torch.Tensor:
        """T tokens (any leading shape), H hidden size, E experts; the result has shape [T, E]."""
        ctx.save_for_backward(input_TH, weight_EH)
        ctx.dtype, ctx.bias_dtype = dtype, None if bias_E is None else bias_E.dtype
        bias = None if bias_E is None else bias_E.to(dtype)
        return torch.nn.functional.linear(input_TH.to(dtype), weight_EH.to(dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        input_TH, weight_EH = ctx.saved_tensors
        (grad_TE,) = grads
        grad_input = (grad_TE @ weight_EH.to(ctx.dtype)).to(input_TH.dtype)
        rows_TE, rows_TH = grad_TE.flatten(0, -2), input_TH.flatten(0, -2)
        grad_weight = (rows_TE.t() @ rows_TH.to(ctx.dtype)).to(weight_EH.dtype)
        grad_bias = None if ctx.bias_dtype is None else rows_TE.sum(0).to(ctx.bias_dtype)
        return grad_input, grad_weight, grad_bias, None


def gate_without_engine(router_gating_linear: Callable[..., Any]) -> Callable[..., Any]:
    """``router_gating_linear(inp, weight, bias, router_dtype)`` in plain torch; before 0.15 routers have no bias."""
    if HAVE_ENGINE:
        return router_gating_linear

    @wraps(router_gating_linear)
    def gated(inp: Any, weight: Any, *bias_and_dtype: Any) -> Any:
        *bias, dtype = bias_and_dtype
        return RouterGating.apply(inp, weight, bias[0] if bias else None, dtype)  # type: ignore[no-untyped-call]

    return gated
