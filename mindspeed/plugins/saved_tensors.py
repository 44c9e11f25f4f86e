"""The tensors that layers keep for backward, as data that features change and the memory planner adds up. Light."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Held = Literal["kept", "recomputed", "swapped", "in backward"]
"""*kept* and *in backward* count at the peak; what is in backward alone is not kept of a forward pass."""


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor that layers keep for backward: its bytes in one layer for one micro-batch.

    ``layers`` of a chunk have it; with ``ends`` the last of them is the one before the loss. With ``once`` a rank has it once,
    whatever is in flight; with ``parts`` it is as large as the largest of these groups of tensors. ``held`` says where it is
    between forward and backward, ``by`` which feature moved it. ``prediction`` tensors are those of multi-token
    prediction, see `leave`. ``chunk`` numbers the model chunks of a rank.
    """

    name: str
    bytes: int
    layers: int
    held: Held = "kept"
    by: str = ""
    ends: bool = False
    once: bool = False
    parts: tuple[tuple[str, ...], ...] = ()
    prediction: bool = False
    chunk: int = 0


SavedTensors = tuple[SavedTensor, ...]


def leave(
    tensors: Sequence[SavedTensor],
    names: Collection[str],
    held: Held,
    by: str,
    layers: int | None = None,
    spare: int = 0,
    prediction: bool = False,
) -> SavedTensors:
    """Return the tensors with those of some names recomputed or swapped in ``layers`` layers of a chunk.

    ``spare`` layers before the loss keep theirs, and multi-token prediction keeps its own without ``prediction``.
    """
    changed: list[SavedTensor] = []
    for tensor in tensors:
        count = min(tensor.layers - (spare if tensor.ends else 0), tensor.layers if layers is None else layers)
        is_own = tensor.name in names and (prediction or not tensor.prediction)
        if not is_own or tensor.held != "kept" or count <= 0:
            changed.append(tensor)
            continue
        changed.append(replace(tensor, layers=count, held=held, by=by))
        if count < tensor.layers:
            changed.append(replace(tensor, layers=tensor.layers - count))
    return tuple(changed)


def in_backward(
    tensors: Sequence[SavedTensor], by: str, layers: int = 1, halves: Collection[Collection[str]] = ()
) -> SavedTensors:
    """Return the tensors, and an entry for those that a feature offloaded in ``layers`` layers, as they are restored
    together. Where layers have only one of the ``halves`` each, the larger one is restored."""
    names = tuple(dict.fromkeys(t.name for t in tensors if t.by == by and t.layers))
    groups = [tuple(name for name in names if name in half) for half in halves] or [names]
    if not any(groups):
        return tuple(tensors)
    return (*tensors, SavedTensor("layers that come back", 0, layers, "in backward", by, once=True, parts=tuple(groups)))


def with_coming_back(tensors: Sequence[SavedTensor]) -> SavedTensors:
    """Return the tensors with the bytes that `in_backward` made a place for, when every feature has changed them."""
    sizes: dict[str, int] = {}
    for tensor in tensors:
        if not tensor.once:
            sizes[tensor.name] = max(tensor.bytes, sizes.get(tensor.name, 0))

    def largest(groups: Sequence[Sequence[str]]) -> int:
        return max(sum(sizes.get(name, 0) for name in group) for group in groups)

    return tuple(replace(t, bytes=largest(t.parts)) if t.parts else t for t in tensors)


def resized(tensors: Sequence[SavedTensor], sizes: dict[str, int]) -> SavedTensors:
    """Return the tensors with other bytes for those in ``sizes``, without those of 0 bytes."""
    changed = (replace(t, bytes=sizes[t.name]) if t.name in sizes else t for t in tensors)
    return tuple(t for t in changed if t.name not in sizes or t.bytes)
