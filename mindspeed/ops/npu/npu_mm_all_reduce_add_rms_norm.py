"""`npu_mm_all_reduce_add_rms_norm` by ``npu_mm_all_reduce_base`` and then ``npu_add_rms_norm``.

The sum over ranks is rounded before the residual is added, once more than in the reference. fp32, fp64, more than three
dimensions, scales of other types than torch_npu documents and groups of other sizes run the reference.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from mindspeed.ops import process_groups
from mindspeed.ops.npu import HALVES, RANKS
from mindspeed.ops.npu_mm_all_reduce_add_rms_norm import ProductInputs
from mindspeed.ops.numerics import filled
from mindspeed.ops.registration import Kernel

_SCALES: Final = {torch.float16: torch.int64, torch.bfloat16: torch.bfloat16}
_SMALLEST_GROUP: Final = 32


def supports(*args: Any) -> bool:
    """Return whether torch_npu documents the call."""
    x1, x2, residual, _, bias, antiquant_scale, antiquant_offset, dequant_scale, group, _ = ProductInputs(*args)
    dtype = residual.dtype
    if process_groups.size_of(group) not in (1, *RANKS):
        return False
    if dtype not in HALVES or x1.dim() not in (2, 3) or residual.dim() < 2 or not filled(x1, x2):
        return False
    if dequant_scale is not None:
        return dequant_scale.dtype == _SCALES[dtype] and (bias is None or bias.dtype == torch.int32)
    like = all(x is None or x.dtype == dtype for x in (bias, antiquant_scale, antiquant_offset))
    rows = rows_of_group(x2, antiquant_scale)
    return like and (rows == 0 or rows % _SMALLEST_GROUP == 0)


def rows_of_group(x2: Tensor, scale: Tensor | None) -> int:
    """Rows of ``x2`` that share a row of its scale; 0 where all do."""
    return 0 if scale is None or scale.dim() < 2 or scale.shape[0] == 1 else x2.shape[0] // scale.shape[0]


def forward(*args: Any) -> tuple[Tensor, Tensor]:
    x1, x2, residual, gamma, bias, antiquant_scale, antiquant_offset, dequant_scale, group, epsilon = ProductInputs(*args)
    product = torch.ops.npu.npu_mm_all_reduce_base(
        x1,
        x2,
        process_groups.hccl_name(group),
        reduce_op="sum",
        bias=bias,
        antiquant_scale=antiquant_scale,
        antiquant_offset=antiquant_offset,
        dequant_scale=dequant_scale,
        antiquant_group_size=rows_of_group(x2, antiquant_scale),
    )
    norm, _, y = torch.ops.npu.npu_add_rms_norm(product.view(residual.shape), residual, gamma, epsilon=epsilon)
    return y, norm


KERNELS: Final[dict[str, Kernel]] = {"npu_mm_all_reduce_add_rms_norm": Kernel(forward, supports)}
