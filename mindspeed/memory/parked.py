"""Storages that are freed together and restored in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import UntypedStorage

from mindspeed.platforms import runtime
from mindspeed.problems import Problem, RunError, advice


@dataclass(slots=True, eq=False)
class LayerPart:
    """A part of a layer that can leave: whether it does, its bytes in the last pass, and its returns while these are timed.

    ``owner`` is the feature that has it leave, ``module`` what it is a part of. ``beside`` are the bytes of inputs
    that are kept only because the part leaves. A return is a pair of events of the device, around the wait for the contents.
    """

    owner: str = ""
    module: str = ""
    active: bool = True
    bytes: int = 0
    beside: int = 0
    returns: list[tuple[Any, Any]] | None = None


class Source:
    """The place that contents are restored from. Without a transfer in flight there is nothing to do."""

    def settle(self) -> None:
        """Return when the contents may be freed."""

    def start(self, storages: Sequence[UntypedStorage]) -> None:
        """Begin to fill the storages, which have their sizes again."""

    def give(self, storages: Sequence[UntypedStorage]) -> None:
        """Have the storages filled."""

    def release(self) -> None:
        """Let go of what is held; the contents are in their storages."""


class Parked:
    """Storages that are freed together and restored in place, so that code which saved a tensor over them notices no change.

    Nothing may read them between `park` and `wait`. The emulation of a device replaces `free`: under its poison they are filled
    with NaN, and an operator that reads one raises RunError with MS617.
    """

    def __init__(self, storages: Sequence[UntypedStorage], source: Source, part: LayerPart | None = None) -> None:
        self.storages = tuple(storages)
        self._source: Source | None = source
        self.part = part or LayerPart()
        self._sizes: tuple[int, ...] = ()
        self._started = False

    @property
    def bytes(self) -> int:
        """The bytes that are freed, or filled with poison."""
        return sum(self._sizes)

    def require_present(self, operator: str) -> None:
        """Raise RunError with MS617 for ``operator``, which read them while their contents were freed."""
        if self._sizes:
            raise read_while_away(self.part, operator)

    def park(self) -> None:
        """Free the contents, once, unless they were waited for already."""
        if self._source is None or self._sizes:
            return
        self._source.settle()
        self._sizes = tuple(storage.nbytes() for storage in self.storages)
        self.part.bytes = self.bytes
        self.free()

    def post(self) -> None:
        """Begin to bring the contents back, once."""
        if self._source is None or not self._sizes or self._started:
            return
        self._started = True
        for storage, size in zip(self.storages, self._sizes, strict=True):
            if storage.nbytes() != size:
                storage.resize_(size)
        self._source.start(self.storages)

    def wait(self) -> None:
        """Have the contents in place, once."""
        if self._source is None:
            return
        returns = self.part.returns
        before = _event() if returns is not None else None
        self.post()
        if self._sizes:
            self.give(self._source)
        self._source.release()
        self._source = None
        self.storages = self._sizes = ()
        if returns is not None:
            returns.append((before, _event()))

    def free(self) -> None:
        """Free the contents."""
        for storage in self.storages:
            storage.resize_(0)

    def give(self, source: Source) -> None:
        """Have the contents filled in."""
        source.give(self.storages)


def read_while_away(part: LayerPart, operator: str) -> RunError:
    """Return the error of an operator that read a part whose contents are away."""
    text = f"{part.owner}: {operator} read a tensor of {part.module} while it was offloaded"
    fix = f"copy the tensor with clone() in the forward pass and read the copy, or remove {part.owner}"
    return RunError([Problem("MS617", text, (part.owner,), fix=advice(fix))])


def _event() -> Any:
    event = runtime.device_module().Event(enable_timing=True)
    event.record()
    return event
