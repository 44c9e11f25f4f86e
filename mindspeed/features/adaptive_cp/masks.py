"""Masks of a plan: computed block by block from a rule, so that no rank needs the whole mask, or given as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mindspeed.context_parallel.mask_rules import MaskRule


class Mask(Protocol):
    """The keys that the queries of a sequence of ``tokens`` do not see."""

    @property
    def tokens(self) -> int: ...

    def block(self, queries: Tensor, keys: Tensor) -> Tensor:
        """[queries, keys], True where hidden, of tokens given by their numbers."""

    def pairs(self, count: int) -> Tensor:
        """Split the tokens into ``count`` chunks and return the visible pairs of tokens of each two, [count, count]."""


@dataclass(frozen=True, slots=True, eq=False)
class WholeMask:
    """A mask [tokens, tokens], True where hidden."""

    hidden: Tensor

    @property
    def tokens(self) -> int:
        return self.hidden.shape[0]

    def block(self, queries: Tensor, keys: Tensor) -> Tensor:
        rows, columns = (numbers.to(self.hidden.device) for numbers in (queries, keys))  # a large mask may be on the host
        return self.hidden[rows][:, columns].to(queries.device)

    def pairs(self, count: int) -> Tensor:
        size = self.tokens // count
        return (~self.hidden).view(count, size, count, size).sum((1, 3))


@dataclass(frozen=True, slots=True)
class RuleMask:
    """A mask by a rule that has a name: a query sees keys up to some distance behind it, and those of the prefix."""

    rule: MaskRule
    tokens: int

    def block(self, queries: Tensor, keys: Tensor) -> Tensor:
        behind = queries[:, None].int() - keys[None, :].int()
        seen = behind >= 0
        if self.rule.width is not None:
            seen &= behind < self.rule.width
        return ~(seen if self.rule.prefix is None else seen | (keys < self.rule.prefix))

    def pairs(self, count: int) -> Tensor:
        size = self.tokens // count
        first = torch.arange(0, self.tokens, size)
        in_prefix = ((self.rule.prefix or 0) - first).clamp(0, size)  # keys of each column that all queries see
        others = size - in_prefix
        ahead = in_prefix - first[:, None] + first[None, :]  # of the first other key before the first query
        seen = _pairs_behind(ahead, size, others)
        if self.rule.width is not None:
            seen -= _pairs_behind(ahead + self.rule.width, size, others)
        return seen + in_prefix * size


def _pairs_behind(least: Tensor, queries: int, keys: Tensor) -> Tensor:
    """Count the pairs of ``i < queries`` and ``j < keys`` with ``i - j >= least``."""

    def up_to(count: Tensor) -> Tensor:
        positive = count.clamp(min=0)
        return positive * (positive + 1) // 2

    return up_to(queries - least) - up_to(-least) - up_to(queries - least - keys) + up_to(-least - keys)


def as_mask(mask: Tensor | Mask) -> Mask:
    """A mask that may have been given as a tensor."""
    return WholeMask(mask) if isinstance(mask, Tensor) else mask
