"""Attention of one process by the operator `mindspeed.ops.fusion_attention`: the score matrix never exists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mindspeed.context_parallel.documents import in_one_row
from mindspeed.context_parallel.fused_attention import BAND, CAUSAL
from mindspeed.context_parallel.position_bias import slopes_of
from mindspeed.ops.attention_mask import compressed_mask
from mindspeed.ops.errors import refuse
from mindspeed.ops.fusion_attention import fusion_attention
from mindspeed.ops.numerics import unflatten


def alibi_slopes(heads: int, device: torch.device | str | None = None) -> Tensor:
    """Return the slopes of ALiBi (Press et al., arXiv 2108.12409), [heads] in fp32."""
    return torch.tensor(slopes_of(heads), dtype=torch.float32, device=device)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    ends: Sequence[Sequence[int]] = (),
    slopes: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Return ``dropout(softmax(scale Q K^T + bias)) V`` of the keys that each query sees; differentiable.

    ``query`` is [batch, tokens, heads, width], ``key`` and ``value`` [batch, keys, key heads, width], all fp64, fp32, bf16 or
    fp16 of one type. The key heads divide the heads, and values may have another width. The result is [batch, tokens, heads,
    width of value]. Under autocast the three are converted to its type.

    With ``causal`` a query sees no later key; the last query sees every key where there are more keys. ``window`` is the number
    of keys that it sees at most, its own included. ``ends`` are for each row of the batch the ends of the documents packed into
    it, which do not see one another. ``slopes`` [heads] (fp32) subtract ``slope * distance`` from the scores. ``scale`` is
    one over the root of the width unless given. Formula: Vaswani et al., arXiv 1706.03762; in strips as Dao, arXiv 2307.08691.
    Raises OperatorError for other shapes and types.
    """
    tokens, keys, heads = query.shape[1], key.shape[1], query.shape[2]
    options: dict[str, Any] = {"scale": query.shape[-1] ** -0.5 if scale is None else scale, "keep_prob": 1 - dropout}
    if window is not None and not (causal and window > 0):
        refuse(f"attention: window is {window} with causal={causal}", "give a window of 1 or more with causal=True")
    if causal:
        options |= {"atten_mask": compressed_mask(query.device), "sparse_mode": CAUSAL}
    if window is not None:
        options |= {"sparse_mode": BAND, "pre_tokens": window - 1, "next_tokens": 0}
    if slopes is not None:
        options |= {"pse": slopes, "pse_type": 2, "q_start_idx": [0 if ends else keys - tokens]}
    if not ends:
        return fusion_attention(query, key, value, heads, "BSND", **options)[0]
    if tokens != keys or [row[-1] for row in ends] != [tokens] * len(query):
        lasts = [row[-1] for row in ends]
        refuse(
            f"attention: the documents end at {lasts}, but the batch has {len(query)} rows of {tokens} tokens and {keys} keys",
            f"give for each of the {len(query)} rows ends of which the last is {tokens}",
        )
    one_row = in_one_row(ends)
    options |= {"actual_seq_qlen": one_row, "actual_seq_kvlen": one_row, "softmax_layout": "TND"}
    q, k, v = (x.flatten(0, 1) for x in (query, key, value))
    return unflatten(fusion_attention(q, k, v, heads, "TND", **options)[0], 0, (len(query), -1))


class Attention(nn.Module):
    """`attention` as a module, with its settings; ``dropout`` is applied in training alone. It has no parameters."""

    def __init__(
        self, *, causal: bool = True, window: int | None = None, dropout: float = 0.0, scale: float | None = None
    ) -> None:
        super().__init__()
        self.causal, self.window, self.dropout, self.scale = causal, window, dropout, scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        ends: Sequence[Sequence[int]] = (),
        slopes: Tensor | None = None,
    ) -> Tensor:
        """Return the attention of ``query`` [batch, tokens, heads, width]; see `attention`."""
        settings: dict[str, Any] = {"causal": self.causal, "window": self.window, "scale": self.scale}
        dropout = self.dropout if self.training else 0.0
        return attention(query, key, value, ends=ends, slopes=slopes, dropout=dropout, **settings)

    def extra_repr(self) -> str:
        return f"causal={self.causal}, window={self.window}, dropout={self.dropout}, scale={self.scale}"
