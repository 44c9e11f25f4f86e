"""`npu_fused_moe_token_permute` on CUDA: a stable sort by torch, then each token read once and written to its rows."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from mindspeed.ops.cuda.npu_fused_moe_token_unpermute import across
from mindspeed.ops.npu_fused_moe_token_permute import _topk
from mindspeed.ops.registration import Kernel
from mindspeed.ops.triton import npu_fused_moe_token_unpermute as kernels
from mindspeed.ops.triton.launch import TYPES, launch, pieces

_COPIED: Final = (*TYPES, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def forward(tokens: Tensor, indices: Tensor, rows: int, padded: bool) -> tuple[Tensor, Tensor]:
    """``(permuted, slots)``."""
    if padded:
        return tokens.index_select(0, indices.flatten()), indices.flatten().to(torch.int32)
    flat, topk, width = indices.flatten(), _topk(indices), tokens.shape[1]
    order = torch.argsort(flat, stable=True)
    places = torch.arange(flat.numel(), dtype=torch.int32, device=flat.device)
    slots = torch.empty_like(places).scatter_(0, order, places)
    permuted = tokens.new_empty((rows, width))
    if rows and width:
        tokens, wide = tokens.contiguous(), across(width)
        tensors, sizes = (tokens, slots, tokens, permuted), {"WEIGHED": False, "COLUMNS": wide}
        launch(kernels.spread, tokens.shape[0] * pieces(width, wide), *tensors, rows, topk, width, **sizes)
    return permuted, slots


KERNELS: Final[dict[str, Kernel]] = {
    "npu_fused_moe_token_permute": Kernel(forward, lambda tokens, indices, rows, padded: tokens.dtype in _COPIED)
}
