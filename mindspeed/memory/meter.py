"""Live and peak bytes of tensors, device and host apart, from the life and the resizes of every storage."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mindspeed import platforms
from mindspeed.memory.byte_count import Bytes


@dataclass(slots=True)
class _Entry:
    owner: str
    storage: weakref.ref[UntypedStorage] = field(repr=False)
    on_device: bool | None = None
    bytes: Bytes = field(default_factory=Bytes)


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the bytes of every storage that is made while the meter is entered, until it is freed.

    >>> with Meter() as meter, meter.owner("layer 1"):
    ...     loss = model(batch)
    >>> meter.live, meter.peak, meter.by_owner()

    A tensor is on the device where its device is neither the CPU nor meta. On the CPU platform it is, unless it is marked as a
    host tensor, which happens behind the operator that made it: sizes are counted at the next operator or reading. Storages
    that were there before are not counted. Under torch's ``FakeTensorMode`` the meter predicts the same bytes in total, all as
    host bytes, without allocating them.
    """

    only_watches = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live = Bytes()
        self._peak = Bytes()
        self._lap = Bytes()
        self._entries: dict[int, _Entry] = {}
        self._new: list[int] = []
        self._by_owner: dict[str, Bytes] = {}
        self._owner = ""

    def __enter__(self) -> Meter:
        resize = self._resize = UntypedStorage.resize_

        def resized(storage: UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._measure(storage._cdata, storage)
            return result

        UntypedStorage.resize_ = resized  # type: ignore[assignment, method-assign]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    @property
    def live(self) -> Bytes:
        """Bytes that exist."""
        self._count_new()
        return self._live

    @property
    def peak(self) -> Bytes:
        """The most bytes that existed at a time, device and host each by itself."""
        self._count_new()
        return self._peak

    def lap(self) -> Bytes:
        """Return the most bytes that existed at a time since the last call."""
        self._count_new()
        lap, self._lap = self._lap, self._live
        return lap

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        self._count_new()
        result = func(*args, **(kwargs or {}))
        inputs = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if _has_storage(leaf)}
        for tensor in tree_leaves(result):
            if _has_storage(tensor):
                self._see(tensor, inputs)
        return result

    @contextmanager
    def owner(self, name: str) -> Iterator[None]:
        """Count what is made inside under a name."""
        before, self._owner = self._owner, name
        try:
            yield
        finally:
            self._owner = before

    def by_owner(self) -> dict[str, Bytes]:
        """Live bytes under each name; "" is what is made outside of `owner`."""
        self._count_new()
        return dict(self._by_owner)

    def _see(self, tensor: Tensor, inputs: set[int]) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._entries:
            self._measure(key, storage)
        elif key not in inputs:  # not made before
            self._entries[key] = _Entry(self._owner, weakref.ref(storage, lambda reference: self._freed(key, reference)))
            self._new.append(key)

    def _count_new(self) -> None:
        new, self._new = self._new, []
        for key in new:
            if (entry := self._entries.get(key)) is not None and (storage := entry.storage()) is not None:
                entry.on_device = _is_on_device(storage)
                self._measure(key, storage)

    def _measure(self, key: int, storage: UntypedStorage) -> None:
        if (entry := self._entries.get(key)) is not None and entry.on_device is not None:
            size = storage.nbytes()
            self._count(entry, Bytes(size, 0) if entry.on_device else Bytes(0, size))

    def _freed(self, key: int, reference: weakref.ref[UntypedStorage]) -> None:
        if (entry := self._entries.get(key)) is not None and entry.storage is reference:
            self._count(entry, Bytes())
            del self._entries[key]

    def _count(self, entry: _Entry, bytes: Bytes) -> None:
        change = bytes - entry.bytes
        entry.bytes = bytes
        self._live += change
        self._by_owner[entry.owner] = self._by_owner.get(entry.owner, Bytes()) + change
        self._peak, self._lap = (_most(before, self._live) for before in (self._peak, self._lap))


def _most(first: Bytes, second: Bytes) -> Bytes:
    return Bytes(max(first.device, second.device), max(first.host, second.host))


def _has_storage(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided


def _is_on_device(storage: UntypedStorage) -> bool:
    if platforms.ACTIVE == "cpu":
        return not hasattr(storage, "is_host")
    return storage.device.type not in ("cpu", "meta")
