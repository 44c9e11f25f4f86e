"""`npu_matmul_add_fp32` on CUDA: one group of the grouped weight gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from mindspeed.ops.cuda.npu_gmm import add_products
from mindspeed.ops.npu_matmul_add_fp32 import _add
from mindspeed.ops.triton.launch import takes


def add(total_input: Tensor, grad_output: Tensor, grad: Tensor) -> None:
    """``grad += grad_output^T total_input``."""
    if not (takes(total_input) and grad.is_contiguous()):
        _add(total_input, grad_output, grad)
        return
    ends = torch.full((1,), total_input.shape[0], dtype=torch.int64, device=total_input.device)
    add_products(grad_output, total_input, ends, grad, True)


KERNELS: Final[dict[str, Callable[..., Any]]] = {"npu_matmul_add_fp32": add}
