"""Mixture-of-experts helpers that assume Transformer Engine or a CUDA device, and losses that are weighed wrongly."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import RowParallelLinear

from mindspeed.megatron.fixes.layers import HAVE_ENGINE
from mindspeed.plugins.patches import Function, wrapper


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


@wrapper
def own_replicas_of_experts(init: Function, self: Any, *args: Any, **kwargs: Any) -> None:
    """``MoELayer.__init__``: gradients of experts are summed over the ranks that have the same shard of an expert.

    Megatron does so only if ep is above 1. At ep 1 they are other ranks than those of dense layers where the tensor-parallel
    sizes differ.
    """
    init(self, *args, **kwargs)
    config = self.config
    if config.expert_model_parallel_size == 1 and config.expert_tensor_parallel_size != config.tensor_model_parallel_size:
        for parameter in self.experts.parameters():
            parameter.allreduce = False


@wrapper
def outputs_of_whole_experts(init: Function, self: Any, *args: Any, **kwargs: Any) -> None:
    """``MoELayer.__init__``: local linear layers of experts leave their output as it is, without a sum over one rank.

    Megatron adds the biases of experts in place, which autograd refuses for the view that such a sum returns. Where several
    ranks hold the experts, Megatron makes no sum either.
    """
    init(self, *args, **kwargs)
    for layer in self.experts.modules():
        if isinstance(layer, RowParallelLinear) and layer.bias is not None:
            layer.explicit_expert_comm = True


@wrapper
def balance_loss_of_all_ranks(
    attach: Function, self: Any, activation: Any, aux_loss_coeff: float, aux_loss: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """``attach_and_log_load_balancing_loss``: with a loss per token it multiplies by the tokens of a rank, not of all.

    What it logs is the loss divided by the coefficient, which stays.
    """
    ranks = _ranks(self)
    return attach(self, activation, aux_loss_coeff * ranks, aux_loss * ranks, *args, **kwargs)


@wrapper
def z_loss_of_all_ranks(apply_z_loss: Function, self: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
    """``apply_z_loss``: the same of the z-loss, whose coefficient it reads."""
    config, ranks = self.config, _ranks(self)
    coefficient = config.moe_z_loss_coeff
    if coefficient is None or ranks == 1:
        return apply_z_loss(self, logits, *args, **kwargs)
    config.moe_z_loss_coeff = coefficient * ranks
    try:
        return apply_z_loss(self, logits, *args, **kwargs)
    finally:
        config.moe_z_loss_coeff = coefficient


def _ranks(router: Any) -> int:
    """Give the number by which Megatron weighs a router's losses too little."""
    return int(router.tp_cp_group.size()) if router.config.calculate_per_token_loss else 1
