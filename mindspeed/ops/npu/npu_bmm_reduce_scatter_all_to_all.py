"""`npu_bmm_reduce_scatter_all_to_all`: one ``npu_grouped_matmul`` for all experts, then collectives of torch.distributed.

The products travel in the type of ``x``, where the reference sends fp32: half the bytes, one more rounding.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from mindspeed.ops.npu.npu_gmm import by_expert
from mindspeed.ops.npu_bmm_reduce_scatter_all_to_all import _scattered_rows
from mindspeed.ops.registration import Kernel


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, ep: str, tp: str, shard_type: int) -> Tensor:
    return _scattered_rows(by_expert(x, weight, None), bias, x.dtype, ep, tp, shard_type)


KERNELS: Final[dict[str, Kernel]] = {"npu_bmm_reduce_scatter_all_to_all": Kernel(forward)}
