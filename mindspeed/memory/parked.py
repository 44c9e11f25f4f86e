"""Storages that leave memory together and come back in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import UntypedStorage

from mindspeed.platforms import runtime
from mindspeed.platforms.emulation import absent
from mindspeed.plugins.active import active_feature

_POISON: Final = 0xFF
"""Every byte of a poisoned storage: NaN in each floating-point type, -1 in each signed integer."""


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
    """The place that contents come back from. Where nothing is under way there is nothing to do."""

    def settle(self) -> None:
        """Return when the contents may be freed."""

    def start(self, storages: Sequence[UntypedStorage]) -> None:
        """Begin to fill the storages, which have their sizes again."""

    def give(self, storages: Sequence[UntypedStorage]) -> None:
        """Have the storages filled."""

    def release(self) -> None:
        """Let go of what is held; the contents are in their storages."""


class Parked:
    """Storages that leave together and come back in place, so that whoever saved a tensor over them notices nothing.

    Nothing may read them between `park` and `wait`. With ``device-emulation.poison`` they are filled with NaN instead of freed,
    and an operator that reads one raises RunError with MS617.
    """

    def __init__(self, storages: Sequence[UntypedStorage], source: Source, part: LayerPart | None = None) -> None:
        self._storages = tuple(storages)
        self._source: Source | None = source
        self._part = part or LayerPart()
        self._sizes: tuple[int, ...] = ()
        self._started = False

    @property
    def bytes(self) -> int:
        """The bytes that are away, or that poison stands for."""
        return sum(self._sizes)

    def require_present(self, operator: str) -> None:
        """Raise RunError with MS617, which says that ``operator`` read them, while the contents are away."""
        if self._sizes:
            raise absent.read_while_absent(self._part.owner, self._part.module, operator)

    def park(self) -> None:
        """Free the contents, once, unless they were waited for already."""
        if self._source is None or self._sizes:
            return
        self._source.settle()
        self._sizes = tuple(storage.nbytes() for storage in self._storages)
        self._part.bytes = self.bytes
        if _is_poisoned():
            for storage in self._storages:
                storage.fill_(_POISON)  # type: ignore[attr-defined]
            absent.mark(self._storages, self._part.owner, self._part.module)
            return
        for storage in self._storages:
            storage.resize_(0)

    def post(self) -> None:
        """Begin to bring the contents back, once."""
        if self._source is None or not self._sizes or self._started:
            return
        self._started = True
        for storage, size in zip(self._storages, self._sizes, strict=True):
            if storage.nbytes() != size:
                storage.resize_(size)
        self._source.start(self._storages)

    def wait(self) -> None:
        """Have the contents in place, once."""
        if self._source is None:
            return
        returns = self._part.returns
        before = _event() if returns is not None else None
        self.post()
        absent.unmark(self._storages)
        if self._sizes:
            self._source.give(self._storages)
        self._source.release()
        self._source = None
        self._storages = self._sizes = ()
        if returns is not None:
            returns.append((before, _event()))


def _event() -> Any:
    event = runtime.device_module().Event(enable_timing=True)
    event.record()
    return event


def _is_poisoned() -> bool:
    layer: Any = active_feature("device-emulation")
    return layer is not None and bool(layer.args.poison)
