"""AttentionVisibility: the keys that a query sees, and the sparse modes of `fusion_attention` in its terms.

Query i and key j count from the start of their sequences; d is the number of keys minus the number of queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from mindspeed.ops.attention_layout import lengths_of, sizes

if TYPE_CHECKING:
    from mindspeed.ops.attention_arguments import AttentionOptions

FULL_MASK_MODES = (0, 1, 5)
"""Modes whose mask has an entry for every query and key; the mask of the others only says that there is one."""


@dataclass(frozen=True)
class AttentionVisibility:
    """Query i sees key j if ``i + first <= j <= i + last`` (None: no bound) or ``j < prefix[b]``, unless ``mask`` hides it.

    ``mask`` is bool, True hidden. In an operator it broadcasts to [B, K, G, queries, keys], K groups of G heads; under context
    parallelism it has the queries of this rank and all keys, [queries, keys] or that with [batch, 1] in front. ``ends`` are
    the ends of the documents packed into each row of the batch, which do not see one another; none means one document.
    Queries and keys are counted from the start of their sequence, over all ranks that share it.
    """

    first: int | None = None
    last: int | None = None
    prefix: tuple[int, ...] | None = None
    mask: Tensor | None = None
    ends: tuple[tuple[int, ...], ...] = ()

    @property
    def causal(self) -> bool:
        """Return whether a query attends to every key up to its position and none after it, apart from a mask."""
        return self.last == 0 and self.first is None and self.prefix is None

    def columns(self, start: int, end: int, keys: int) -> tuple[int, int]:
        """The range of keys outside of which the queries ``start`` to ``end`` see none."""
        low = 0 if self.first is None or self.prefix else max(0, start + self.first)
        high = keys if self.last is None else min(keys, end + self.last)
        if self.prefix:
            high = max(high, *self.prefix)
        return low, max(low, min(high, keys))

    def pairs(self, queries: int, keys: int, batch: int = 1) -> int:
        """Count the pairs of query and key that the bounds and prefixes of ``batch`` sequences let see; a mask is not read."""
        until = queries * keys if self.last is None else _staircase(queries, keys, self.last + 1)
        before = 0 if self.first is None else _staircase(queries, keys, self.first)
        if not self.prefix:
            return batch * (until - before)
        own = [min(end, keys) for end in self.prefix]
        return sum(queries * end + _staircase(queries, keys - end, (self.last or 0) + 1 - end) for end in own)

    def hidden(self, rows: tuple[int, int], columns: tuple[int, int], device: torch.device) -> Tensor | None:
        """True where a query of ``rows`` does not see a key of ``columns``; None if all are seen."""
        i = torch.arange(*rows, device=device)[:, None]
        j = torch.arange(*columns, device=device)
        hidden: Tensor | None = None
        if self.last is not None:
            hidden = j > i + self.last
        if self.first is not None:
            before = j < i + self.first
            hidden = before if hidden is None else hidden | before
        if hidden is not None and self.prefix is not None:
            ends = torch.tensor(self.prefix, device=device).view(-1, 1, 1, 1, 1)
            hidden = hidden & (j >= ends)
        if self.mask is not None:
            masked = self.mask[..., rows[0] : rows[1], columns[0] : columns[1]]
            hidden = masked if hidden is None else hidden | masked
        return hidden


def _staircase(queries: int, keys: int, start: int) -> int:
    """Sum over queries i of ``i + start`` keys, each no less than none and no more than all."""

    def below(count: int) -> int:
        """Sum over all x below ``count``."""
        if count <= 0:
            return 0
        return count * (count - 1) // 2 if count <= keys else keys * (keys - 1) // 2 + (count - keys) * keys

    return below(queries + start) - below(start)


def visibility(
    options: AttentionOptions, queries: int, keys: int, prefix: tuple[int, ...] | None, mask: Tensor | None, at_edge: bool
) -> AttentionVisibility:
    """Make the visibility of one sequence under a sparse mode; ``at_edge``: modes 7 and 8 give this one a band."""
    mode, shift = options.mode, keys - queries
    if mode == 0:
        return AttentionVisibility(-options.before, options.after, mask=mask)
    if mode == 1:
        return AttentionVisibility(mask=mask)
    if mode == 4 or (mode in (7, 8) and at_edge):
        return AttentionVisibility(shift - options.before, shift + options.after)
    if mode in (5, 6):
        return AttentionVisibility(last=shift, prefix=prefix, mask=mask if mode == 5 else None)
    return AttentionVisibility(last=0 if mode in (2, 8) else shift)


def sequence_at_edge(lengths: Sequence[tuple[int, int]], mode: int) -> int | None:
    """Number of the packed sequence that has a band: for mode 7 the last one with queries, for mode 8 the first one."""
    filled = [number for number, (queries, _) in enumerate(lengths) if queries]
    return filled[-1 if mode == 7 else 0] if filled and mode in (7, 8) else None


CAUSAL: Final = AttentionVisibility(last=0)
"""Every query sees the keys up to its own place."""


def attention_visibility(
    causal: bool = True, mask: Tensor | None = None, ends: Sequence[Sequence[int]] = ()
) -> AttentionVisibility:
    """The visibility of a causal mask, or of another ``mask`` in its place, or of all keys; within documents if ``ends``."""
    return AttentionVisibility(last=0 if causal and mask is None else None, mask=mask, ends=tuple(map(tuple, ends)))


_SIDE: Final = 2048
_PREFIX_ROWS: Final = 1024
_COMPRESSED: Final[dict[tuple[torch.device, bool], Tensor]] = {}


def compressed_mask(device: torch.device, with_prefix: bool = False) -> Tensor:
    """The one mask of all causal modes, [2048, 2048], True hidden: 4 MiB, made once for each device.

    ``with_prefix``: the mask of mode 6, [3072, 2048], in which 1024 rows follow of which the right half is hidden. A fake mask,
    which has no contents, is kept by its mode.
    """
    mode: Any = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    fake = {} if mode is None else vars(mode).setdefault("_compressed_masks", {})
    real = _COMPRESSED if mode is None or mode.allow_non_fake_inputs else {}
    for masks in (fake, real):
        if (device, with_prefix) in masks:
            kept: Tensor = masks[device, with_prefix]
            return kept
    with torch.inference_mode(False):  # one that is made in inference mode could not be used in training
        mask = torch.ones(_SIDE, _SIDE, dtype=torch.bool, device=device).triu_(1)
        if with_prefix:
            mask = F.pad(mask, (0, 0, 0, _PREFIX_ROWS))
            mask[_SIDE:, _SIDE // 2 :] = True
    (fake if isinstance(mask, FakeTensor) else _COMPRESSED)[device, with_prefix] = mask
    return mask


# As torch.compiler.assume_constant_result, which would import all of TorchDynamo here.
compressed_mask._dynamo_marked_constant = True  # type: ignore[attr-defined]


def forget_compressed_masks() -> None:
    """Drop the masks, so that the bytes of the next job include those that it makes."""
    _COMPRESSED.clear()


def visible_pairs(query: Tensor, key: Tensor, mask: Tensor | None, options: AttentionOptions) -> int:
    """Count the pairs of all heads and sequences of a call. A mask with an entry for every pair is read, unless it is fake."""
    if options.layout != "TND":
        (batch, queries), (_, keys) = sizes(query, options.layout), sizes(key, options.layout)
        prefix = None if options.prefix is None else tuple(options.prefix)
        return _pairs(mask, (batch, queries, keys), prefix, False, options)
    lengths = lengths_of(query, key, options)
    edge = sequence_at_edge(lengths, options.mode)
    total = 0
    for n, length in enumerate(lengths):
        prefix = None if options.prefix is None else (options.prefix[n],)
        total += _pairs(mask, (1, *length), prefix, n == edge, options)
    return total


def _pairs(
    mask: Tensor | None, shape: tuple[int, int, int], prefix: tuple[int, ...] | None, at_edge: bool, options: AttentionOptions
) -> int:
    batch, queries, keys = shape
    if mask is None:
        return options.heads * AttentionVisibility().pairs(queries, keys, batch)
    seen = visibility(options, queries, keys, prefix, None, at_edge)
    if options.mode not in FULL_MASK_MODES or prefix is not None or isinstance(mask, FakeTensor) or mask.is_meta:
        return options.heads * seen.pairs(queries, keys, batch)
    hidden = mask[..., :queries, :keys]
    outside = seen.hidden((0, queries), (0, keys), mask.device)
    hidden = hidden if outside is None else hidden | outside
    repeated = batch * options.heads * queries * keys // max(1, hidden.numel())
    return repeated * int((~hidden).sum())
