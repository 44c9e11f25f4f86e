"""`npu_fused_moe_token_unpermute` by ``npu_moe_token_unpermute`` and ``npu_moe_token_unpermute_grad_v2``.

Several rows per token without probabilities, which is the gradient of the permute, go to ``npu_moe_token_permute_grad_v2``.
Their gradient selects a token for each row by torch. Sums in padded mode and other types than bf16 run the
reference; so does a gradient with probabilities that need none, since torch_npu would want rows that were not kept.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from mindspeed.ops.npu_fused_moe_token_unpermute import inverse
from mindspeed.ops.numerics import filled
from mindspeed.ops.registration import Kernel


def _supports(rows: Tensor, probs: Tensor | None, padded: bool) -> bool:
    types = all(x is None or x.dtype == torch.bfloat16 for x in (rows, probs))
    return types and not padded and filled(rows)


def forward(rows: Tensor, indices: Tensor, probs: Tensor | None, tokens: int, topk: int, padded: bool) -> Tensor:
    slots = indices.to(torch.int32)
    y: Tensor
    if probs is None and topk > 1:
        y = torch.ops.npu.npu_moe_token_permute_grad_v2(rows, slots, tokens, rows.dtype, topk, padded_mode=False)
        return y
    y = torch.ops.npu.npu_moe_token_unpermute(rows, slots, probs=probs)
    return y


def _supports_backward(
    dout: Tensor, rows: Tensor | None, indices: Tensor, probs: Tensor | None, count: int, topk: int, padded: bool
) -> bool:
    if probs is None:
        return count > 0 and _supports(dout, None, False)
    return rows is not None and count > 0 and _supports(dout, probs, padded)


def backward(
    dout: Tensor, rows: Tensor | None, indices: Tensor, probs: Tensor | None, count: int, topk: int, padded: bool
) -> tuple[Tensor, Tensor]:
    if probs is None and (padded or topk > 1):
        token_R = indices if padded else inverse(indices)[:count] // topk
        return dout.index_select(0, token_R), dout.new_empty(0)
    drows, dprobs = torch.ops.npu.npu_moe_token_unpermute_grad_v2(
        dout, indices.to(torch.int32), count, dout.dtype, probs=probs, permuted_tokens=rows
    )
    return drows, dout.new_empty(0) if probs is None else dprobs


KERNELS: Final[dict[str, Kernel]] = {
    "npu_fused_moe_token_unpermute": Kernel(
        forward, lambda rows, indices, probs, tokens, topk, padded: _supports(rows, probs, padded)
    ),
    "npu_fused_moe_token_unpermute_backward": Kernel(backward, _supports_backward),
}
