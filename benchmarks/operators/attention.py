"""Causal attention of a layer, forward and backward: torch's flash kernel through our operator, against the score matrix."""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.operators.timing import forward_backward, race
from benchmarks.operators.timing import rows as rows_of
from benchmarks.table import Row
from mindspeed.ops import fusion_attention

LENGTH: Final = 1024
HEADS, GROUPS, WIDTH = 8, 4, 64
SCALE: Final = WIDTH**-0.5


def rows() -> list[Row]:
    return [row for dtype in (torch.float32, torch.bfloat16) for row in _rows(dtype)]


def _rows(dtype: torch.dtype) -> list[Row]:
    mask = torch.ones(2048, 2048, dtype=torch.bool).triu_(1)
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu_(1)
    q, k, v = (torch.randn(LENGTH, 1, heads, WIDTH).to(dtype).requires_grad_() for heads in (HEADS, GROUPS, GROUPS))

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        flat = (x.flatten(2) for x in (q, k, v))
        return fusion_attention(*flat, HEADS, "SBH", atten_mask=mask, sparse_mode=3, scale=SCALE)[0]

    def scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As Megatron's core attention does it, without its scratch buffer."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, *(x.repeat_interleave(HEADS // GROUPS, 2) for x in (k, v))))
        logits = (q @ k.transpose(-1, -2) * SCALE).masked_fill_(hidden, -10000.0)
        return (torch.softmax(logits, -1) @ v).permute(2, 0, 1, 3).flatten(2)

    def torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)

    wanted = (q, k, v)
    made = {name: forward_backward(run, *wanted, wanted=wanted) for name, run in {"score matrix": scores, "F": torchs}.items()}
    result = race(forward_backward(ours, *wanted, wanted=wanted), made, turns=7)
    what = f"causal attention, {LENGTH} tokens, {str(dtype).removeprefix('torch.')}, forward + backward"
    same = "F is torch's scaled_dot_product_attention, the same kernel without our layouts"
    note = f"ours {result.seconds['ours'] * 1e3:.0f} ms; {same}"
    return rows_of(what, result, {"score matrix": 1.0, "F": 0.9}, note)
