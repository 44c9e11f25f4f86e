"""`npu_groupmatmul_add_fp32` by ``npu_grouped_matmul_add_``; fp32 and fp64 operands run the reference."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from mindspeed.ops.npu import HALVES, narrow
from mindspeed.ops.numerics import filled
from mindspeed.ops.registration import Kernel

GROUPS: Final = 1024


def _supports(x: Tensor, dy: Tensor, groups: Tensor, grad: Tensor) -> bool:
    return x.dtype in HALVES and groups.shape[0] <= GROUPS and filled(x, dy) and narrow(x.shape[1], dy.shape[1])


def add(x: Tensor, dy: Tensor, groups: Tensor, grad: Tensor) -> None:
    experts, k, n = groups.shape[0], x.shape[1], dy.shape[1]
    torch.ops.npu.npu_grouped_matmul_add_(
        grad.view(experts, k, n), x, dy, groups.to(x.device), transpose_x=True, group_type=2, group_list_type=0
    )


KERNELS: Final[dict[str, Kernel]] = {"npu_groupmatmul_add_fp32": Kernel(add, _supports)}
