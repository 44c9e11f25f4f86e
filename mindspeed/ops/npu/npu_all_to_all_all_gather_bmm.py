"""`npu_all_to_all_all_gather_bmm`: collectives of torch.distributed, then product and bias by ``npu_grouped_matmul``.

The experts' rows lie one after the other, so their products are one grouped product. Its result is rounded before the
activation, once more than in the reference. fp64 runs the reference.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from mindspeed.ops.activations import activate
from mindspeed.ops.npu.npu_gmm import by_expert
from mindspeed.ops.npu_all_to_all_all_gather_bmm import _gathered_rows
from mindspeed.ops.numerics import rounded, wide
from mindspeed.ops.registration import Kernel


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, ep: str, tp: str, shard_type: int, act: str
) -> tuple[Tensor, Tensor, Tensor]:
    y2 = _gathered_rows(x, weight, ep, tp, shard_type)
    y3 = by_expert(y2, weight, bias)
    if act == "none":
        return y3, y2, x.new_empty(0)
    return rounded(activate(wide(y3), act), x.dtype), y2, y3


KERNELS: Final[dict[str, Kernel]] = {"npu_all_to_all_all_gather_bmm": Kernel(forward)}
