"""`npu_groupmatmul_add_fp32` on CUDA: the product is added to the gradient where its sum ends, in fp32."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from mindspeed.ops.cuda.npu_gmm import add_products, ends_on
from mindspeed.ops.registration import Kernel
from mindspeed.ops.triton.launch import takes


def add(x: Tensor, dy: Tensor, groups: Tensor, grad: Tensor) -> None:
    """``grad[e] += x_e^T dy_e``."""
    add_products(x, dy, ends_on(x.device, groups, x.shape[0], True), grad, True)


KERNELS: Final[dict[str, Kernel]] = {"npu_groupmatmul_add_fp32": Kernel(add, lambda x, *_: takes(x))}
