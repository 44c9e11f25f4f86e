"""Rows of experts back to tokens: ``out[t] = sum_k probs[t, k] rows[sorted_indices[t K + k]]``, a dropped row being zero.

With ``padded_mode`` the indices name the token of each row instead, and ``out[t]`` is the sum of ``probs[r] rows[r]`` over
its rows. Summed in fp32 (fp64 for fp64 rows) and rounded once; exact without probabilities where a token has one row.
Saved for backward: the indices and the probabilities; the rows only if the probabilities need a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed.ops.errors import require
from mindspeed.ops.numerics import wide, wide_type
from mindspeed.ops.registration import define


def npu_fused_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> Tensor:
    """Undo `npu_fused_moe_token_permute` with the ``sorted_indices`` that it gave, weighing the rows of each token.

    ``permuted_tokens`` is [R, H], ``sorted_indices`` [T K], ``probs`` [T, K]; the result is [T, H]. Without ``probs`` K is 1,
    or follows from a ``restore_shape`` (T, H).
    With ``padded_mode`` ``sorted_indices`` has R entries, ``probs`` R in any shape, and ``restore_shape`` is (T, H).
    Raises OperatorError for other shapes or types.
    """
    op = "npu_fused_moe_token_unpermute"
    fits = permuted_tokens.dim() == 2 and permuted_tokens.is_floating_point()
    require(
        fits,
        op,
        f"permuted_tokens is {permuted_tokens.dtype} of shape {tuple(permuted_tokens.shape)}, but must be a "
        "floating-point matrix",
    )
    integer = sorted_indices.dtype in (torch.int32, torch.int64)
    require(integer, op, f"sorted_indices is {sorted_indices.dtype}, but must be int32 or int64")
    require(probs is None or probs.is_floating_point(), op, "probs must have a floating-point type")
    entries, (rows, width) = sorted_indices.numel(), permuted_tokens.shape
    if padded_mode:
        known = restore_shape is not None and len(restore_shape) == 2 and restore_shape[1] == width
        require(known, op, f"padded_mode needs restore_shape=(tokens, {width}), but restore_shape is {restore_shape}")
        require(entries == rows, op, f"sorted_indices has {entries} entries, but permuted_tokens has {rows} rows")
        same = probs is None or probs.numel() == rows
        require(same, op, f"probs must have one number for each of {rows} rows")
        tokens, topk = (restore_shape or (0,))[0], 1
    else:
        one = probs is None or (probs.dim() == 2 and probs.numel() == entries)
        require(one, op, f"probs must be [tokens, K] with one number for each of the {entries} sorted_indices")
        tokens = probs.shape[0] if probs is not None else entries if restore_shape is None else restore_shape[0]
        topk = probs.shape[1] if probs is not None else entries // max(tokens, 1)
        require(tokens * topk == entries, op, f"{entries} sorted_indices are not a multiple of {tokens} tokens")
    y: Tensor = torch.ops.mindspeed.npu_fused_moe_token_unpermute(
        permuted_tokens, sorted_indices.flatten(), probs, tokens, topk, padded_mode
    )
    return y


def _gather(rows: Tensor, indices: Tensor) -> Tensor:
    """``rows[indices]`` in a wide type, with zeros for indices beyond the last row."""
    missing = indices >= rows.shape[0]
    if rows.shape[0] == 0:
        return rows.new_zeros((*indices.shape, rows.shape[1]), dtype=wide_type(rows.dtype))
    return wide(rows[indices.masked_fill(missing, 0)]).masked_fill(missing[..., None], 0)


def _forward(rows: Tensor, indices: Tensor, probs: Tensor | None, tokens: int, topk: int, padded: bool) -> Tensor:
    indices = indices.long()
    if padded:
        weighted = wide(rows) if probs is None else wide(rows) * wide(probs).reshape(-1, 1)
        return weighted.new_zeros((tokens, rows.shape[1])).index_add_(0, indices, weighted).to(rows.dtype)
    out = rows.new_zeros((tokens, rows.shape[1]), dtype=wide_type(rows.dtype))
    by_token = indices.view(tokens, topk)
    for k in range(topk):  # one slot after the other: nothing of the size of all slots is ever held
        picked = _gather(rows, by_token[:, k])
        out += picked if probs is None else picked * wide(probs[:, k, None])
    return out.to(rows.dtype)


def inverse(indices: Tensor) -> Tensor:
    """The inverse of a permutation: the slot of each row."""
    slots = torch.arange(indices.numel(), device=indices.device)
    return torch.empty_like(slots).scatter_(0, indices.long(), slots)


def _backward(
    dout: Tensor, rows: Tensor | None, indices: Tensor, probs: Tensor | None, count: int, topk: int, padded: bool
) -> tuple[Tensor, Tensor]:
    """Reference: gradients of the ``count`` rows and of the probabilities, the latter empty without ``rows``."""
    indices = indices.long()
    if padded:
        slot, token = torch.arange(count, device=dout.device), indices
    else:
        slot = inverse(indices)[:count]
        token = slot // topk if topk else slot
    drows = dout[token] if probs is None else (wide(dout[token]) * wide(probs).reshape(-1)[slot, None]).to(dout.dtype)
    if rows is None or probs is None:
        return drows, dout.new_empty(0)
    dots = (wide(dout[token]) * wide(rows)).sum(-1)
    dprobs = dots.new_zeros(probs.numel()).index_put_((slot,), dots)
    return drows, dprobs.view(probs.shape).to(probs.dtype)


def _forward_shape(rows: Tensor, indices: Tensor, probs: Tensor | None, tokens: int, topk: int, padded: bool) -> Tensor:
    return rows.new_empty((tokens, rows.shape[1]))


def _backward_shapes(
    dout: Tensor, rows: Tensor | None, indices: Tensor, probs: Tensor | None, count: int, topk: int, padded: bool
) -> tuple[Tensor, Tensor]:
    drows = dout.new_empty((count, dout.shape[1]))
    return drows, dout.new_empty(0) if rows is None or probs is None else probs.new_empty(probs.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, indices, probs, _, ctx.topk, ctx.padded = inputs
    ctx.count = rows.shape[0]
    ctx.of_probs = ctx.needs_input_grad[2]
    ctx.save_for_backward(rows if ctx.of_probs else None, indices, probs)


def _gradient(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    rows, indices, probs = ctx.saved_tensors
    drows, dprobs = torch.ops.mindspeed.npu_fused_moe_token_unpermute_backward(
        dout, rows, indices, probs, ctx.count, ctx.topk, ctx.padded
    )
    return drows, None, dprobs if ctx.of_probs else None, None, None, None


define(
    "npu_fused_moe_token_unpermute(Tensor rows, Tensor indices, Tensor? probs, SymInt tokens, SymInt topk, bool padded) "
    "-> Tensor",
    _forward,
    _forward_shape,
    _save,
    _gradient,
)
define(
    "npu_fused_moe_token_unpermute_backward(Tensor dout, Tensor? rows, Tensor indices, Tensor? probs, SymInt count, "
    "SymInt topk, bool padded) -> (Tensor, Tensor)",
    _backward,
    _backward_shapes,
)
