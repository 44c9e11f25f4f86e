"""Merge of two attention results over disjoint keys, each with the maximum and sum of its softmax.

``m = max(m1, m2)``, ``s_i' = s_i exp(m_i - m)``, ``s = s1' + s2'``, ``out = out1 s1'/s + out2 s2'/s``; computed in fp32 (fp64
for fp64 statistics), rounded once to the type of the first result. A row that neither side saw (maximum -inf, sum 0) stays
zero. It has no gradient: the backward of ring attention starts from the final statistics.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mindspeed.ops.autocast import in_widest_type
from mindspeed.ops.errors import require
from mindspeed.ops.numerics import rounded, wide
from mindspeed.ops.registration import define, like, no_gradient


@in_widest_type("prev_attn_out", "cur_attn_out")
def npu_ring_attention_update(
    prev_attn_out: Tensor,
    prev_softmax_max: Tensor,
    prev_softmax_sum: Tensor,
    cur_attn_out: Tensor,
    cur_softmax_max: Tensor,
    cur_softmax_sum: Tensor,
    actual_seq_qlen: Tensor | Sequence[int] | None = None,
    layout: str = "SBH",
    softmax_layout: str = "",
    seen: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Merge ``cur`` into ``prev`` and give ``(attn_out, softmax_max, softmax_sum)``, all new tensors.

    ``layout`` SBH: outputs [S, B, H], statistics [B, N, S, 8]. TND: outputs [T, N, D], statistics [T, N, 8]; with
    ``softmax_layout`` "TND" in that order, with "" the memory of each sub-sequence holds [N, length, 8] instead, and
    ``actual_seq_qlen`` gives the cumulative lengths, a leading 0 being allowed. The last dimension of statistics is a
    repetition and may have any size but 0. ``seen`` promises that each row was seen by one side or both, which saves the
    work for others. Raises OperatorError for other shapes, types or layouts.
    """
    op, layout = "npu_ring_attention_update", layout.upper()
    outs, stats = (prev_attn_out, cur_attn_out), (prev_softmax_max, prev_softmax_sum, cur_softmax_max, cur_softmax_sum)
    require(layout in ("SBH", "TND"), op, f"layout is {layout}, but must be SBH or TND")
    require(softmax_layout in ("", "TND"), op, f"softmax_layout is {softmax_layout}, but must be empty or TND")
    shapes = [tuple(out.shape) for out in outs]
    require(
        shapes[0] == shapes[1] and len(shapes[0]) == 3, op, f"the outputs have different shapes, {shapes[0]} and {shapes[1]}"
    )
    require(outs[0].dtype == outs[1].dtype, op, f"the outputs have different types, {outs[0].dtype} and {outs[1].dtype}")
    same = all(stat.shape == stats[0].shape and stat.dtype == stats[0].dtype for stat in stats)
    require(same and stats[0].is_floating_point(), op, "the four statistics must have the same shape and floating-point type")
    shape = tuple(stats[0].shape)
    if layout == "TND":
        fits = len(shape) == 3 and shape[:2] == shapes[0][:2] and shape[2] > 0
    else:
        s, b, h = shapes[0]
        fits = len(shape) == 4 and (shape[0], shape[2]) == (b, s) and shape[1] > 0 and h % shape[1] == 0 and shape[3] > 0
    require(fits, op, f"statistics of shape {shape} do not match {layout} outputs of shape {shapes[0]}")
    ends = None
    if layout == "TND" and softmax_layout == "":
        require(actual_seq_qlen is not None, op, "the layout TND needs actual_seq_qlen, unless softmax_layout is TND")
        ends = torch.as_tensor(actual_seq_qlen, dtype=torch.int64)
    out, maximum, total = torch.ops.mindspeed.npu_ring_attention_update(
        prev_attn_out, prev_softmax_max, prev_softmax_sum, cur_attn_out, cur_softmax_max, cur_softmax_sum, ends, layout, seen
    )
    return out, maximum, total


def token_major(stats: Tensor, ends: Tensor) -> Tensor:
    """[T, N, k] statistics whose sub-sequences lie in memory as [N, length, k], in the order of the tokens."""
    parts, start, flat = [], 0, stats.reshape(-1)
    heads, lanes = stats.shape[1:]
    for end in ends.tolist():
        part = flat[start * heads * lanes : end * heads * lanes]
        parts.append(part.reshape(heads, end - start, lanes).transpose(0, 1))
        start = end
    require(start == stats.shape[0], "npu_ring_attention_update", f"actual_seq_qlen ends at {start}, not at {stats.shape[0]}")
    return torch.cat(parts) if parts else stats


def sequence_major(stats: Tensor, ends: Sequence[int]) -> Tensor:
    """The inverse of `token_major`: [T, N, k] whose sub-sequences lie in memory as [N, length, k]."""
    parts = [part.transpose(0, 1).reshape(-1) for part in stats.tensor_split(list(ends)[:-1])]
    return torch.cat(parts).view(stats.shape)


def _forward(
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
    maximum = torch.maximum(max1, max2)
    # exp(-inf - -inf) is not a number: where neither side saw a key, both shares are zero
    base = maximum if seen else maximum.masked_fill(maximum == -torch.inf, 0)
    shares = [total * torch.exp(m - base) for m, total in ((max1, sum1), (max2, sum2))]
    total = shares[0] + shares[1]
    divisor = total if seen else total.masked_fill(total == 0, 1)
    weights = [(share / divisor)[..., :1] for share in shares]
    if layout == "SBH":
        weights = [w.permute(2, 0, 1, 3) for w in weights]
    elif ends is not None:
        weights = [token_major(w, ends) for w in weights]
    heads = weights[0].shape[-2]
    by_head = (*out1.shape[:2], heads, out1.shape[2] // heads) if layout == "SBH" else out1.shape
    merged = wide(out1).reshape(by_head) * weights[0] + wide(out2).reshape(by_head) * weights[1]
    return rounded(merged.reshape(out1.shape), out1.dtype), maximum.contiguous(), total.contiguous()


define(
    "npu_ring_attention_update(Tensor out1, Tensor max1, Tensor sum1, Tensor out2, Tensor max2, Tensor sum2, "
    "Tensor? ends, str layout, bool seen) -> (Tensor, Tensor, Tensor)",
    _forward,
    like(0, 1, 1),
    gradient=no_gradient("npu_ring_attention_update"),
)
