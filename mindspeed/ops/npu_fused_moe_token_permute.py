"""Tokens to rows of experts: one copy of each token per expert, in the order of the experts, stable within one.

A copy, so exact. Its gradient sums the rows of a token in fp32 (fp64 for fp64) and rounds once.
Saved for backward: the indices alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import mindspeed.ops.npu_fused_moe_token_unpermute  # noqa: F401  it registers the operator of the gradient
from mindspeed.ops.errors import require
from mindspeed.ops.registration import define


def npu_fused_moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """Give ``(permuted_tokens, sorted_indices)``.

    ``tokens`` is [T, H], ``indices`` [T, K] or [T] the experts of each token. Of the T K rows sorted by expert,
    the first ``num_out_tokens`` are kept if that is positive, all but ``-num_out_tokens`` otherwise.
    ``sorted_indices`` (int32, T K) says at which row each slot ended, for `npu_fused_moe_token_unpermute`.
    With ``padded_mode`` ``indices`` [E, capacity] is the token of each row, whatever expert it is for.
    Raises OperatorError for other shapes or types.
    """
    op = "npu_fused_moe_token_permute"
    require(tokens.dim() == 2, op, f"tokens has shape {tuple(tokens.shape)}, but must be [tokens, width]")
    require(indices.dtype in (torch.int32, torch.int64), op, f"indices is {indices.dtype}, but must be int32 or int64")
    rows = indices.numel()
    if not padded_mode:
        fits = indices.dim() in (1, 2) and indices.shape[0] == tokens.shape[0]
        require(fits, op, f"indices of shape {tuple(indices.shape)} do not match {tokens.shape[0]} tokens")
        asked = num_out_tokens or 0
        rows = min(asked, rows) if asked > 0 else max(rows + asked, 0)
    permuted, slots = torch.ops.mindspeed.npu_fused_moe_token_permute(tokens, indices, rows, padded_mode)
    return permuted, slots


def _forward(tokens: Tensor, indices: Tensor, rows: int, padded: bool) -> tuple[Tensor, Tensor]:
    flat = indices.flatten()
    if padded:
        return tokens[flat], flat.to(torch.int32, copy=True)
    order = torch.argsort(flat, stable=True)
    slots = torch.empty_like(flat, dtype=torch.int32)
    slots[order] = torch.arange(flat.numel(), dtype=torch.int32, device=flat.device)
    return tokens[order[:rows] // max(_topk(indices), 1)], slots


def _topk(indices: Tensor) -> int:
    return indices.shape[1] if indices.dim() == 2 else 1


def _shapes(tokens: Tensor, indices: Tensor, rows: int, padded: bool) -> tuple[Tensor, Tensor]:
    return tokens.new_empty((rows, tokens.shape[1])), indices.new_empty(indices.numel(), dtype=torch.int32)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, int, bool], output: tuple[Tensor, Tensor]) -> None:
    tokens, indices, _, ctx.padded = inputs
    ctx.tokens, ctx.topk = tokens.shape[0], 1 if ctx.padded else _topk(indices)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1])


def _gradient(ctx: Any, drows: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
    (slots,) = ctx.saved_tensors
    dtokens = torch.ops.mindspeed.npu_fused_moe_token_unpermute(drows, slots, None, ctx.tokens, ctx.topk, ctx.padded)
    return dtokens, None, None, None


define(
    "npu_fused_moe_token_permute(Tensor tokens, Tensor indices, SymInt rows, bool padded) -> (Tensor, Tensor)",
    _forward,
    _shapes,
    _save,
    _gradient,
)
