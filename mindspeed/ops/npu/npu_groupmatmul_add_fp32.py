"""`npu_groupmatmul_add_fp32` by ``npu_grouped_matmul_add_``; fp32 and fp64 operands run the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from mindspeed.ops.npu import HALVES, filled, narrow
from mindspeed.ops.npu_groupmatmul_add_fp32 import _add

GROUPS: Final = 1024


def add(x: Tensor, dy: Tensor, groups: Tensor, grad: Tensor) -> None:
    experts, k, n = groups.shape[0], x.shape[1], dy.shape[1]
    if x.dtype not in HALVES or experts > GROUPS or not filled(x, dy) or not narrow(k, n):
        _add(x, dy, groups, grad)
        return
    torch.ops.npu.npu_grouped_matmul_add_(
        grad.view(experts, k, n), x, dy, groups.to(x.device), transpose_x=True, group_type=2, group_list_type=0
    )


KERNELS: Final[dict[str, Callable[..., Any]]] = {"npu_groupmatmul_add_fp32": add}
