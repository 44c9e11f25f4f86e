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

    def seen(self, count: int) -> Tensor:
        """Split the tokens into ``count`` chunks and return which chunk attends to which, [count, count]."""


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

    def seen(self, count: int) -> Tensor:
        size = self.tokens // count
        return ~self.hidden.view(count, size, count, size).all(3).all(1)


@dataclass(frozen=True, slots=True)
class RuleMask:
    """A mask by a rule that has a name: a query sees keys up to some distance behind it, and those of the prefix."""

    rule: MaskRule
    tokens: int

    def block(self, queries: Tensor, keys: Tensor) -> Tensor:
        behind = queries[:, None].int() - keys[None, :].int()
        return ~self._sees(behind, behind, keys)

    def seen(self, count: int) -> Tensor:
        size = self.tokens // count
        first = torch.arange(0, self.tokens, size)
        farthest = first[:, None] + size - 1 - first[None, :]
        return self._sees(farthest, farthest - 2 * (size - 1), first)

    def _sees(self, farthest: Tensor, nearest: Tensor, first: Tensor) -> Tensor:
        """Tell whether a key ``nearest`` to ``farthest`` behind a query is seen; ``first`` are the first keys of columns."""
        seen = farthest >= 0
        if self.rule.width is not None:
            seen &= nearest < self.rule.width
        return seen if self.rule.prefix is None else seen | (first < self.rule.prefix)


def as_mask(mask: Tensor | Mask) -> Mask:
    """A mask that may have been given as a tensor."""
    return WholeMask(mask) if isinstance(mask, Tensor) else mask
