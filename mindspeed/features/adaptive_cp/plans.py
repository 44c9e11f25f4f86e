"""Plans of masks that come with batches, one for each content: making one costs far more than finding it again."""

from __future__ import annotations

import hashlib
from typing import Any, Final

from torch import Tensor

from mindspeed import plugins as ms
from mindspeed.features.adaptive_cp.attention import AdaptivePlan, plan_mask

_KEPT: Final = 4
"""Masks, and plans, that are kept: each mask has a byte for every pair of tokens."""

_Place = tuple[int, int, tuple[int, ...], tuple[int, ...]]


class Plans:
    """Finds plans by the address of a mask, which all layers of a micro-batch share, else by its contents.

    A mask that is kept here keeps its memory, so no other one can lie in its place; one that was changed has another version.
    """

    def __init__(self) -> None:
        self._by_place: dict[_Place, tuple[Tensor, AdaptivePlan]] = {}
        self._by_content: dict[tuple[bytes, int], AdaptivePlan] = {}

    def of(self, mask: Tensor, tokens: int, ranks: int) -> AdaptivePlan:
        """The plan over ``ranks`` of ``mask`` [tokens, tokens] or [batch, 1, tokens, tokens], True where hidden.

        Raises MS333 for a mask of another shape, or whose samples differ.
        """
        place = mask.data_ptr(), 0 if mask.is_inference() else mask._version, tuple(mask.shape), mask.stride()
        if place not in self._by_place:
            self._by_place[place] = mask, self._read(_agreed(mask, tokens), ranks)
            _shorten(self._by_place)
        return self._by_place[place][1]

    def _read(self, mask: Tensor, ranks: int) -> AdaptivePlan:
        content = hashlib.blake2b(mask.cpu().contiguous().numpy().data, digest_size=16).digest(), ranks
        if content not in self._by_content:
            self._by_content[content] = plan_mask(mask.clone(), ranks)  # the caller may change its mask later
            _shorten(self._by_content)
        return self._by_content[content]

    def clear(self) -> None:
        """Let everything go."""
        self._by_place.clear()
        self._by_content.clear()


def _shorten(known: dict[Any, Any]) -> None:
    """Let the oldest go."""
    if len(known) > _KEPT:
        del known[next(iter(known))]


def _agreed(mask: Tensor, tokens: int) -> Tensor:
    """The one mask of all samples."""
    if mask.shape[-2:] != (tokens, tokens) or mask.dim() not in (2, 4) or (mask.dim() == 4 and mask.shape[1] != 1):
        expected = f"{(tokens, tokens)} or {('batch', 1, tokens, tokens)}"
        raise _refused(
            f"the mask of a batch has shape {tuple(mask.shape)}, but {expected} is expected", "give the mask of all tokens"
        )
    rows = mask.reshape(-1, tokens, tokens)
    if not bool((rows == rows[0]).all()):
        raise _refused("the samples of a batch have different masks", "--micro-batch-size 1, or use ring-attention instead")
    return rows[0]


def _refused(sentence: str, fix: str) -> ms.MindSpeedError:
    return ms.MindSpeedError([ms.Problem("MS333", f"adaptive-cp: {sentence}", ("adaptive-cp",), fix=ms.Fix.advise(fix))])
