"""`npu_grouped_mat_mul_all_reduce` by one ``npu_mm_all_reduce_base`` per product.

The bias is added to each sum afterwards, in fp32, in place of a share of it on every rank. fp32, fp64 and groups of another
size than 2, 4, 8 or 16 run the reference.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from mindspeed.ops import process_groups
from mindspeed.ops.npu import HALVES, RANKS
from mindspeed.ops.numerics import filled, rounded, wide
from mindspeed.ops.registration import Kernel


def _supports(x: list[Tensor], weight: list[Tensor], bias: list[Tensor] | None, group: str) -> bool:
    return process_groups.size_of(group) in RANKS and all(part.dtype in HALVES for part in x) and filled(*x, *weight)


def forward(x: list[Tensor], weight: list[Tensor], bias: list[Tensor] | None, group: str) -> list[Tensor]:
    name, results = process_groups.hccl_name(group), []
    for i, (part, matrix) in enumerate(zip(x, weight, strict=True)):
        y = torch.ops.npu.npu_mm_all_reduce_base(part, matrix, name, reduce_op="sum")
        results.append(y if bias is None else rounded(wide(y) + wide(bias[i]), y.dtype))
    return results


KERNELS: Final[dict[str, Kernel]] = {"npu_grouped_mat_mul_all_reduce": Kernel(forward, _supports)}
