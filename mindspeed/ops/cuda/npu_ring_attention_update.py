"""`npu_ring_attention_update` on CUDA: outputs, maxima and sums in one pass, whatever order the statistics have."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from mindspeed.ops.errors import require
from mindspeed.ops.registration import Kernel
from mindspeed.ops.triton import npu_ring_attention_update as kernels
from mindspeed.ops.triton.launch import launch, pieces, power, takes, tile, warps


def _supports(out1: Tensor, max1: Tensor, *_: Any) -> bool:
    return takes(out1) and max1.dtype == torch.float32 and out1.numel() > 0 and max1.numel() > 0


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
    """``(out, maximum, sum)``; the kernel masks rows that neither side saw at no cost."""
    heads, (first, second, last) = max1.shape[1], out1.shape
    rows, width = (first * second * heads, last // heads) if layout == "SBH" else (first * second, last)
    order, starts, lengths = 0 if layout == "SBH" else 1, max1, max1
    if layout != "SBH" and ends is not None:
        order, (starts, lengths) = 2, _sequences(ends, first, max1.device)
    inputs = [x.contiguous() for x in (out1, max1, sum1, out2, max2, sum2)]
    results = [x.new_empty(x.shape) for x in inputs[:3]]
    tall, wide = tile(width, rows)
    launch(
        kernels.merge,
        pieces(rows, tall),
        *(*inputs, *results, starts, lengths),
        *(rows, heads, width, second, first, max1.shape[-1]),
        ORDER=order,
        ROWS=tall,
        COLUMNS=wide,
        LANES=power(max1.shape[-1]),
        num_warps=warps(tall * wide),
    )
    return results[0], results[1], results[2]


def _sequences(ends: Tensor, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Start and length of the packed sequence of each token."""
    known = ends.tolist()
    last = known[-1] if known else 0
    require(last == tokens, "npu_ring_attention_update", f"actual_seq_qlen ends at {last}, not at {tokens}")
    ends = ends.to(device)
    starts = torch.cat((ends.new_zeros(1), ends[:-1]))
    which = torch.searchsorted(ends, torch.arange(tokens, device=device), right=True)
    return starts[which], (ends - starts)[which]


KERNELS: Final[dict[str, Kernel]] = {"npu_ring_attention_update": Kernel(forward, _supports)}
