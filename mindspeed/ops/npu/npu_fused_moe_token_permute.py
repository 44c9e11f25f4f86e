"""`npu_fused_moe_token_permute` by ``npu_moe_token_permute``; its gradient is the unpermute of that file.

In padded mode rows are selected by torch. Other types than bf16, more than 512 experts per token and no rows at all run the
reference.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from mindspeed.ops.npu_fused_moe_token_permute import _topk
from mindspeed.ops.numerics import filled
from mindspeed.ops.registration import Kernel

_CHOICES: Final = 512


def _supports(tokens: Tensor, indices: Tensor, rows: int, padded: bool) -> bool:
    few = padded or _topk(indices) <= _CHOICES
    return tokens.dtype == torch.bfloat16 and few and rows > 0 and filled(tokens)


def forward(tokens: Tensor, indices: Tensor, rows: int, padded: bool) -> tuple[Tensor, Tensor]:
    if padded:
        return tokens.index_select(0, indices.flatten()), indices.flatten().to(torch.int32)
    chosen = indices if indices.dim() == 2 else indices[:, None]
    permuted, slots = torch.ops.npu.npu_moe_token_permute(tokens, chosen, num_out_tokens=rows)
    return permuted, slots


KERNELS: Final[dict[str, Kernel]] = {"npu_fused_moe_token_permute": Kernel(forward, _supports)}
