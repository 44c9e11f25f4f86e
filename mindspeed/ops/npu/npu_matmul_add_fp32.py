"""`npu_matmul_add_fp32` by ``npu_grouped_matmul_add_`` with a single group, torch_npu having no plain one.

fp32 and fp64 operands, and a buffer that is not contiguous, run the reference.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from mindspeed.ops.npu import HALVES, narrow
from mindspeed.ops.numerics import filled
from mindspeed.ops.registration import Kernel


def _supports(total_input: Tensor, grad_output: Tensor, grad: Tensor) -> bool:
    return total_input.dtype in HALVES and grad.is_contiguous() and filled(total_input, grad_output) and narrow(*grad.shape)


def add(total_input: Tensor, grad_output: Tensor, grad: Tensor) -> None:
    tokens = total_input.shape[0]
    ends = torch.full((1,), tokens, dtype=torch.int64, device=grad.device)
    torch.ops.npu.npu_grouped_matmul_add_(
        grad[None], grad_output, total_input, ends, transpose_x=True, group_type=2, group_list_type=0
    )


KERNELS: Final[dict[str, Kernel]] = {"npu_matmul_add_fp32": Kernel(add, _supports)}
