"""Causal attention of a layer, forward and backward: torch's flash kernel through our operator, against its peers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.operators.timing import forward_backward, race
from benchmarks.operators.timing import rows as rows_of
from benchmarks.table import Row
from mindspeed.ops import fusion_attention

LENGTH: Final = 1024
DOCUMENTS: Final = (100, 300, 624, 1024)
HEADS, GROUPS, WIDTH = 8, 4, 64
SCALE: Final = WIDTH**-0.5


def rows() -> list[Row]:
    made = (make for dtype in (torch.float32, torch.bfloat16) for make in (_rows(dtype), _alibi(dtype), _documents(dtype)))
    return [row for some in made for row in some]


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


def _alibi(dtype: torch.dtype) -> list[Row]:
    """Time slopes per head against the bias that they stand for, made before."""
    mask = torch.ones(2048, 2048, dtype=torch.bool).triu_(1)
    q, k, v = (torch.randn(1, heads, LENGTH, WIDTH).to(dtype).requires_grad_() for heads in (HEADS, GROUPS, GROUPS))
    slopes, place = torch.pow(2.0, -torch.arange(1.0, HEADS + 1)), torch.arange(LENGTH)
    distance = place[:, None] - place
    bias = (-slopes[:, None, None] * distance).masked_fill(distance < 0, -torch.inf).to(dtype)[None]

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options: dict[str, Any] = {"atten_mask": mask, "sparse_mode": 3, "scale": SCALE, "pse": slopes, "pse_type": 2}
        return fusion_attention(q, k, v, HEADS, "BNSD", **options)[0]

    def torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=SCALE, enable_gqa=True)

    name = f"causal attention with ALiBi, {LENGTH} tokens"
    return _against("F with a bias", name, ours, torchs, (q, k, v), "its bias of all heads is made before it is timed")


def _documents(dtype: torch.dtype) -> list[Row]:
    """Time one call for packed documents against a call per document."""
    mask, ends = torch.ones(2048, 2048, dtype=torch.bool).triu_(1), list(accumulate(DOCUMENTS))
    q, k, v = (torch.randn(ends[-1], heads, WIDTH).to(dtype).requires_grad_() for heads in (HEADS, GROUPS, GROUPS))

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options: dict[str, Any] = {"atten_mask": mask, "sparse_mode": 3, "scale": SCALE}
        return fusion_attention(q, k, v, HEADS, "TND", actual_seq_qlen=ends, actual_seq_kvlen=ends, **options)[0]

    def torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sides = zip(*(x.transpose(0, 1)[None].split(DOCUMENTS, 2) for x in (q, k, v)), strict=True)
        outs = [F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True) for q, k, v in sides]
        return torch.cat(outs, 2)[0].transpose(0, 1)

    name = f"causal attention within documents of {', '.join(map(str, DOCUMENTS))} tokens"
    return _against("F per document", name, ours, torchs, (q, k, v), "")


def _against(
    peer: str,
    name: str,
    ours: Callable[..., Tensor],
    torchs: Callable[..., Tensor],
    inputs: tuple[Tensor, ...],
    note: str,
) -> list[Row]:
    result = race(
        forward_backward(ours, *inputs, wanted=inputs), {peer: forward_backward(torchs, *inputs, wanted=inputs)}, turns=7
    )
    what = f"{name}, {str(inputs[0].dtype).removeprefix('torch.')}, forward + backward"
    text = "; ".join(filter(None, (f"ours {result.seconds['ours'] * 1e3:.0f} ms", note)))
    return rows_of(what, result, {peer: 0.97}, text)
