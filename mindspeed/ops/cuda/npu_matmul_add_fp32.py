"""`npu_matmul_add_fp32` on CUDA: one group of the grouped weight gradient."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from mindspeed.ops.cuda.npu_gmm import add_products
from mindspeed.ops.registration import Kernel
from mindspeed.ops.triton.launch import takes


def add(total_input: Tensor, grad_output: Tensor, grad: Tensor) -> None:
    """``grad += grad_output^T total_input``."""
    ends = torch.full((1,), total_input.shape[0], dtype=torch.int64, device=total_input.device)
    add_products(grad_output, total_input, ends, grad, True)


KERNELS: Final[dict[str, Kernel]] = {
    "npu_matmul_add_fp32": Kernel(add, lambda total_input, grad_output, grad: takes(total_input) and grad.is_contiguous())
}
