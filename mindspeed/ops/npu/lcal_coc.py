"""`lcal_coc`: ``npu_all_gather_base_mm``, ``npu_mm_reduce_scatter_base`` and ``npu_mm_all_reduce_base``.

Those take no bias other than zero: it is added afterwards, in fp32. The two-dimensional form gathers by torch.distributed and
scatters with the product. fp32, fp64, groups of another size than 2, 4, 8 or 16 and inner sizes outside of [256, 65535) run
the reference. `pure_matmul` is torch's own product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from mindspeed.ops import lcal_coc as reference
from mindspeed.ops import process_groups
from mindspeed.ops.npu import HALVES, RANKS
from mindspeed.ops.numerics import filled
from mindspeed.ops.registration import Kernel

_INNER: Final = range(256, 65535)


def _supports(number: int, inner: range = _INNER) -> Callable[..., bool]:
    """Make the test of a product whose collective runs in the group of this number."""

    def supports(x1: Tensor, x2: Tensor, bias: Tensor | None, groups: list[str]) -> bool:
        ranks = process_groups.size_of(groups[number])
        return x1.dtype in HALVES and filled(x1, x2) and ranks in RANKS and x1.shape[1] in inner

    return supports


def pure_matmul(x1: Tensor, x2: Tensor, bias: Tensor | None, groups: list[str]) -> Tensor:
    return reference.with_bias(x1 @ x2, bias, x1.dtype)


def matmul_all_reduce(x1: Tensor, x2: Tensor, bias: Tensor | None, groups: list[str]) -> Tensor:
    product = torch.ops.npu.npu_mm_all_reduce_base(x1, x2, process_groups.hccl_name(groups[0]), reduce_op="sum")
    return reference.with_bias(product, bias, x1.dtype)


def all_gather_matmul(x1: Tensor, x2: Tensor, bias: Tensor | None, groups: list[str]) -> Tensor:
    product, _ = torch.ops.npu.npu_all_gather_base_mm(
        x1, x2, process_groups.hccl_name(groups[0]), process_groups.size_of(groups[0]), gather_index=0, gather_output=False
    )
    return reference.with_bias(product, bias, x1.dtype)


def all_gather_matmul_v2(x1: Tensor, x2: Tensor, bias: Tensor | None, groups: list[str]) -> tuple[Tensor, Tensor]:
    product, rows = torch.ops.npu.npu_all_gather_base_mm(
        x1, x2, process_groups.hccl_name(groups[0]), process_groups.size_of(groups[0]), gather_index=0, gather_output=True
    )
    return reference.with_bias(product, bias, x1.dtype), rows


def matmul_reduce_scatter(x1: Tensor, x2: Tensor, bias: Tensor | None, groups: list[str]) -> Tensor:
    return _scatter(x1, x2, bias, groups[0])


def all_gather_matmul_reduce_scatter(x1: Tensor, x2: Tensor, bias: Tensor | None, groups: list[str]) -> Tensor:
    return _scatter(reference._gathered(x1, groups[0]), x2, bias, groups[1])


def _scatter(x1: Tensor, x2: Tensor, bias: Tensor | None, group: str) -> Tensor:
    part = torch.ops.npu.npu_mm_reduce_scatter_base(
        x1, x2, process_groups.hccl_name(group), process_groups.size_of(group), reduce_op="sum"
    )
    return reference.with_bias(part, bias, x1.dtype)


KERNELS: Final[dict[str, Kernel]] = {
    "lcal_coc_pure_matmul": Kernel(pure_matmul),
    "lcal_coc_matmul_all_reduce": Kernel(matmul_all_reduce, _supports(0, range(1, 65536))),
    "lcal_coc_all_gather_matmul": Kernel(all_gather_matmul, _supports(0)),
    "lcal_coc_all_gather_matmul_v2": Kernel(all_gather_matmul_v2, _supports(0)),
    "lcal_coc_matmul_reduce_scatter": Kernel(matmul_reduce_scatter, _supports(0)),
    "lcal_coc_all_gather_matmul_reduce_scatter": Kernel(all_gather_matmul_reduce_scatter, _supports(1)),
}
