"""`npu_fused_moe_token_unpermute` on CUDA: sums gathered by token, no atomics. ``padded_mode`` runs the reference."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from mindspeed.ops.registration import Kernel
from mindspeed.ops.triton import npu_fused_moe_token_unpermute as kernels
from mindspeed.ops.triton.launch import launch, pieces, power, takes

_COLUMNS: Final = 2048
"""Elements of a row that one program holds."""


def across(width: int) -> int:
    """The columns of one program, for rows of ``width``."""
    return min(power(width), _COLUMNS)


def forward(rows: Tensor, indices: Tensor, probs: Tensor | None, tokens: int, topk: int, padded: bool) -> Tensor:
    """The tokens."""
    out, (count, width) = rows.new_empty((tokens, rows.shape[1])), rows.shape
    if not width:
        return out
    rows, indices, weights = rows.contiguous(), indices.contiguous(), rows if probs is None else probs.contiguous()
    wide = across(width)
    sizes = {"WEIGHED": probs is not None, "COLUMNS": wide}
    tensors = (rows, indices, weights, out)
    launch(kernels.gather, tokens * pieces(width, wide), *tensors, count, topk, width, **sizes)
    return out


def backward(
    dout: Tensor, rows: Tensor | None, indices: Tensor, probs: Tensor | None, count: int, topk: int, padded: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of the rows and of the probabilities, the latter empty without ``rows``."""
    dout, indices, (tokens, width) = dout.contiguous(), indices.contiguous(), dout.shape
    drows, wide = dout.new_empty((count, width)), across(width)
    if rows is None or probs is None or not width or not topk:
        dprobs = dout.new_empty(0) if rows is None or probs is None else torch.zeros_like(probs)
        weights = dout if probs is None else probs.contiguous()
        moved, sizes = (dout, indices, weights, drows), {"WEIGHED": probs is not None, "COLUMNS": wide}
        launch(kernels.spread, tokens * pieces(width, wide), *moved, count, topk, width, **sizes)
        return drows, dprobs
    dprobs = probs.new_empty(probs.shape)
    tensors = (dout, rows.contiguous(), indices, probs.contiguous(), drows, dprobs)
    launch(kernels.spread_and_dot, tokens, *tensors, count, topk, width, COLUMNS=wide, TOPK=power(topk))
    return drows, dprobs


KERNELS: Final[dict[str, Kernel]] = {
    "npu_fused_moe_token_unpermute": Kernel(
        forward, lambda rows, indices, probs, tokens, topk, padded: not padded and takes(rows, probs)
    ),
    "npu_fused_moe_token_unpermute_backward": Kernel(
        backward, lambda dout, rows, indices, probs, count, topk, padded: not padded and takes(dout, rows, probs)
    ),
}
