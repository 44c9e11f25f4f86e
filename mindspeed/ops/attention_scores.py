"""Logits of attention, block by block: scale, position bias, visibility and dropout of one batch of equally long sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from mindspeed.ops.attention_mask import FULL_MASK_MODES, AttentionVisibility, visibility
from mindspeed.ops.numerics import unflatten, wide

if TYPE_CHECKING:
    from mindspeed.ops.attention_arguments import AttentionOptions

COMPRESSED_ROWS: Final = 1024
_GOLDEN, _FIRST, _SECOND = (c - (1 << 64) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_THIRD, _FOURTH = 0x7FEB352D, 0x846CA68B - (1 << 32)
"""Odd factors of a 32-bit hash (Wellons, hash-prospector 2018)."""

Span = tuple[int, int]


@dataclass(frozen=True)
class Dropout:
    """A mask that is a function of the seed, the row and the column: any block of it can be made at any time.

    ``first`` is the number of rows of earlier sequences.

    Rows and columns are hashed in 64 bits, which is little work; what is done for every element has 32.
    """

    keep: float
    seed: Tensor
    first: int
    shape: tuple[int, int, int, int, int]

    def factors(self, rows: Span, columns: Span, dtype: torch.dtype) -> Tensor:
        """``1 / keep`` for kept elements of a block [B, K, G, rows, columns], 0 for dropped ones."""
        b, k, g, queries, _ = self.shape
        device = self.seed.device
        head = torch.arange(b * k * g, device=device).view(b, k, g, 1, 1)
        row = _hashed(head * queries + torch.arange(*rows, device=device)[:, None] + self.first, self.seed)
        z = row ^ _hashed(torch.arange(*columns, device=device), ~self.seed)
        z *= _THIRD
        z ^= z >> 15
        z *= _FOURTH
        kept = z < round(self.keep * (1 << 32)) - (1 << 31)
        return kept.to(dtype).mul_(1 / self.keep if self.keep > 0 else 0.0)


def _hashed(numbers: Tensor, seed: Tensor) -> Tensor:
    """32 bits of the finalizer of splitmix64 (Steele, Lea, Flood 2014); torch shifts arithmetically, hence the masks."""
    z = numbers * _GOLDEN + seed
    z = (z ^ (z >> 30 & (1 << 34) - 1)) * _FIRST
    z = (z ^ (z >> 27 & (1 << 37) - 1)) * _SECOND
    return (z ^ (z >> 31 & (1 << 33) - 1)).to(torch.int32)


@dataclass(frozen=True)
class Bias:
    """Position bias: type 0 and 1 a tensor [B | 1, K, G, rows, keys], 2 and 3 slopes [B | 1, K, G, 1, 1].

    ``compressed``: the tensor has the last 1024 rows only; an earlier row repeats its first row, moved along the diagonal.
    """

    kind: int
    tensor: Tensor
    q_start: int
    kv_start: int
    compressed: bool

    def _places(self, rows: Span, columns: Span) -> tuple[Tensor, Tensor]:
        keys, device = self.tensor.shape[-1], self.tensor.device
        i = torch.arange(*rows, device=device)[:, None]
        row = (i - (keys - COMPRESSED_ROWS)).clamp(0, COMPRESSED_ROWS - 1)
        column = torch.arange(*columns, device=device) + keys - COMPRESSED_ROWS + row - i
        return row.expand_as(column), column.clamp(0, keys - 1)

    def block(self, rows: Span, columns: Span) -> Tensor:
        if self.kind >= 2:
            i = torch.arange(*rows, device=self.tensor.device)[:, None] + self.q_start
            distance = (i - torch.arange(*columns, device=self.tensor.device) - self.kv_start).abs().to(self.tensor.dtype)
            return -self.tensor * (distance if self.kind == 2 else distance.sqrt())
        if self.compressed:
            row, column = self._places(rows, columns)
            return wide(self.tensor[..., row, column])
        rows = rows if self.tensor.shape[-2] > 1 else (0, 1)
        return wide(self.tensor[..., slice(*rows), slice(*columns)])

    def add_gradient(self, grad: Tensor, dlogits: Tensor, rows: Span, columns: Span) -> None:
        """Add the gradient of one block to ``grad``, which has the shape of the tensor."""
        if grad.shape[0] == 1:
            dlogits = dlogits.sum(0, keepdim=True)
        if self.compressed:
            row, column = self._places(rows, columns)
            flat = grad.view(*grad.shape[:3], -1)
            flat.index_add_(-1, (row * grad.shape[-1] + column).flatten(), dlogits.flatten(-2))
            return
        if grad.shape[-2] == 1:
            grad[..., slice(*columns)] += dlogits.sum(-2, keepdim=True)
        else:
            grad[..., slice(*rows), slice(*columns)] += dlogits


@dataclass(frozen=True)
class AttentionScores:
    """Everything between queries and keys and their probabilities."""

    scale: float
    size: tuple[int, int]
    """The numbers of queries and of keys."""
    visibility: AttentionVisibility
    bias: Bias | None
    dropout: Dropout | None

    def logits(self, products: Tensor, rows: Span, columns: Span) -> Tensor:
        """Masked logits of a block from its products [B, K, G, rows, columns]; a hidden one is -inf."""
        if self.bias is None:
            logits = products * self.scale
        elif self.bias.kind == 1:
            logits = (products + self.bias.block(rows, columns)) * self.scale
        else:
            logits = products * self.scale + self.bias.block(rows, columns)
        hidden = self.visibility.hidden(rows, columns, products.device)
        return logits if hidden is None else logits.masked_fill(hidden, -torch.inf)


class AttentionBatch(NamedTuple):
    """A batch of equally long sequences: views of tensors as [B, N, S, D] (queries), [B, K, T, D] (keys) and [B, N, S]."""

    query_side: Sequence[Tensor]
    key_side: Sequence[Tensor]
    stats: Sequence[Tensor]
    scores: AttentionScores

    @property
    def by_group(self) -> AttentionBatch:
        """The batch with queries [B, K, G, S, D] and statistics [B, K, G, S], by the heads of keys."""
        groups, heads = self.key_side[0].shape[1], self.query_side[0].shape[1]
        sides = (self.query_side, self.stats)
        queries, stats = ([unflatten(x, 1, (groups, heads // groups)) for x in side] for side in sides)
        return self._replace(query_side=queries, stats=stats)


def scores_of(
    queries: int,
    keys: int,
    prefix: tuple[int, ...] | None,
    at_edge: bool,
    pse: Tensor | None,
    mask: Tensor | None,
    dropout: Dropout | None,
    split: tuple[int, int],
    options: AttentionOptions,
) -> AttentionScores:
    """Make the scores of equally long sequences; ``split`` is the number of key heads and of query heads for each."""
    bias = None
    if pse is not None:
        compressed = _is_compressed(pse, queries, options)
        by_head = pse[..., None, None] if options.pse_type >= 2 else pse
        by_head = by_head if by_head.dim() == 4 else by_head[None]
        bias = Bias(options.pse_type, unflatten(by_head, 1, split), options.q_start, options.kv_start, compressed)
    if mask is None:
        return AttentionScores(options.scale, (queries, keys), AttentionVisibility(), bias, dropout)
    by_group = _mask_by_group(mask[..., :queries, :keys], split) if options.mode in FULL_MASK_MODES else None
    seen = visibility(options, queries, keys, prefix, by_group, at_edge)
    return AttentionScores(options.scale, (queries, keys), seen, bias, dropout)


def _mask_by_group(mask: Tensor, split: tuple[int, int]) -> Tensor:
    by_head = mask if mask.dim() == 4 else mask[None, None]
    return unflatten(by_head, 1, split) if by_head.shape[1] > 1 else by_head.unsqueeze(1)


def _is_compressed(pse: Tensor, queries: int, options: AttentionOptions) -> bool:
    external = options.pse_type < 2 and pse.shape[-2] == COMPRESSED_ROWS
    return external and (options.layout == "TND" or queries > COMPRESSED_ROWS)
