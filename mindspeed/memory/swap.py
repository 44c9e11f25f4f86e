"""Layers whose storages are on the host between forward and backward: out behind the next layer, back one layer ahead."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, UntypedStorage

from mindspeed.memory.on_host import HostBuffers, OnHost
from mindspeed.memory.parked import LayerPart, Parked


@dataclass(slots=True, eq=False)
class Pass:
    """Hold what each layer of a model chunk has given away in one forward pass, in order."""

    unit: Hashable
    parked: list[Parked] = field(default_factory=list)


class LayerSwap:
    """Swap what layers keep, over all forward passes that are in flight.

    The contents of a layer begin to leave when `leave` is called, and are freed when the layer behind it has ended. They begin
    to come back when backward enters the layer behind it, across passes too: the order of backward passes is that of the step
    before, in the first step that of the forward passes.

    >>> swap.begin(unit)
    >>> swap.leave(storages, output)  # in each layer; the gradient of output arrives before the storages are read
    >>> swap.layer_ended(hidden)  # behind each layer
    >>> swap.end()
    """

    def __init__(self) -> None:
        self._buffers = HostBuffers()
        self._current = Pass(None)
        self._begun = False
        self._in_flight: list[Pass] = []
        self._order: list[Hashable] = []
        self._backward: list[Hashable] = []

    def begin_step(self) -> None:
        """Begin a step: of the one before, the order of backward passes is known."""
        self._order, self._backward = self._backward or self._order, []
        self._in_flight.clear()

    def begin(self, unit: Hashable = None) -> None:
        """Begin a forward pass."""
        self._current, self._begun = Pass(unit), True

    def begin_unless_begun(self) -> None:
        """Begin a forward pass where no schedule has, which then has no end."""
        if not self._begun:
            self._current = Pass(None)

    def end(self) -> None:
        """End a forward pass: nothing follows that hides a transfer."""
        self._begun = False
        if self._current.parked:
            self._current.parked[-1].park()

    def leave(self, storages: Sequence[UntypedStorage], output: Tensor, part: LayerPart | None = None) -> None:
        """Give away the storages of a layer until the gradient of ``output`` arrives."""
        if not storages:
            return
        parked = Parked(storages, OnHost(storages, self._buffers), part)
        if not self._current.parked:
            self._in_flight.append(self._current)
        self._current.parked.append(parked)
        output.register_hook(lambda gradient: parked.wait())  # type: ignore[no-untyped-call]

    def layer_ended(self, hidden: Tensor, left: bool) -> None:
        """Free what earlier layers gave away, and bring it back when the gradient of ``hidden`` arrives.

        ``left`` says whether the layer that ended gave something away itself.
        """
        pass_ = self._current
        before = len(pass_.parked) - left
        if before:
            pass_.parked[before - 1].park()

        def ahead(gradient: Any) -> None:
            self._enter_backward(pass_)
            if before:
                pass_.parked[before - 1].post()
            elif following := self._following():
                following.parked[-1].post()

        if hidden.requires_grad:
            hidden.register_hook(ahead)  # type: ignore[no-untyped-call]

    def enter_backward(self) -> None:
        """Bring back the last layer of the pass whose backward is next."""
        if following := self._following():
            following.parked[-1].post()

    def _enter_backward(self, pass_: Pass) -> None:
        if pass_ in self._in_flight:
            self._in_flight.remove(pass_)
            self._backward.append(pass_.unit)

    def _following(self) -> Pass | None:
        """The pass whose backward is next, as far as its forward has run."""
        place = len(self._backward)
        candidates = [one for one in self._in_flight if place >= len(self._order) or one.unit == self._order[place]]
        return candidates[0] if candidates else None
