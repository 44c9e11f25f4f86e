"""`npu_ring_attention_update` by ``npu_ring_attention_update`` of torch_npu.

That one makes "not a number" of a row that neither side saw (-inf minus -inf). Unless the call promises that there is none,
unseen rows go in with the lowest finite maximum and sum 1, which weigh nothing beside a row that was seen, and come out as
unseen. Other types than fp32 for the statistics, other than 8 repetitions, and packed heads whose width is no multiple of 64
run the reference.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed.ops.npu import TYPES
from mindspeed.ops.numerics import filled
from mindspeed.ops.registration import Kernel

_LANES, _PACKED_WIDTH = 8, 64
_LOWEST: Final = torch.finfo(torch.float32).min


def _supports(out: Tensor, stat: Tensor, layout: str) -> bool:
    lanes = stat.dtype == torch.float32 and stat.shape[-1] == _LANES
    return out.dtype in TYPES and lanes and filled(out) and (layout == "SBH" or out.shape[-1] % _PACKED_WIDTH == 0)


def _finite(maximum: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    unseen = total == 0
    return maximum.masked_fill(unseen, _LOWEST), total.masked_fill(unseen, 1.0)


def forward(
    out1: Tensor,
    max1: Tensor,
    sum1: Tensor,
    out2: Tensor,
    max2: Tensor,
    sum2: Tensor,
    ends: Tensor | None,
    layout: str,
    seen: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    starts = None
    if layout == "TND":
        # one sequence of all tokens will do where the statistics are in the order of the tokens; a second 0 in front is
        # an empty sequence, which changes nothing
        whole = torch.full((1,), out1.shape[0], dtype=torch.int64, device=out1.device)
        starts = F.pad(whole if ends is None else ends.to(out1.device), (1, 0))
    if not seen:
        (max1, sum1), (max2, sum2) = _finite(max1, sum1), _finite(max2, sum2)
    out, maximum, total = torch.ops.npu.npu_ring_attention_update(
        out1,
        max1,
        sum1,
        out2,
        max2,
        sum2,
        actual_seq_qlen=starts,
        input_layout=layout,
        input_softmax_layout="TND" if layout == "TND" and ends is None else "",
    )
    if seen:
        return out, maximum, total
    unseen = maximum == _LOWEST
    return out, maximum.masked_fill(unseen, -torch.inf), total.masked_fill(unseen, 0.0)


KERNELS: Final[dict[str, Kernel]] = {
    "npu_ring_attention_update": Kernel(forward, lambda out1, max1, *rest: _supports(out1, max1, rest[-2]))
}
