"""Main weights and states of an optimizer that rest in host memory and are on the device for their window alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mindspeed.memory import transfers
from mindspeed.memory.windows import MainWeight, OptimizerWindow
from mindspeed.platforms.host_copy import host_tensor

TO_HOST: Final = "optimizer to host"
TO_DEVICE: Final = "optimizer to device"
_MAIN: Final = "main weights"
_RESIDUAL: Final = "residual"


class Swapped:
    """The host buffers of an optimizer's main weights and states, page-locked where the device is another one.

    `around` brings a window to the device and begins with the one that follows. What a window leaves behind travels back beside
    the next one. Where residuals stand for main weights they travel instead.
    """

    def __init__(self) -> None:
        self._buffers: WeakKeyDictionary[MainWeight, dict[str, Tensor]] = WeakKeyDictionary()
        self._coming: dict[int, _Moved] = {}
        self._leaving: list[_Moved] = []

    def around(self, window: OptimizerWindow) -> AbstractContextManager[None]:
        """Give a step its window on the device, and a checkpoint all windows on the host."""
        return self._on_device(window) if window.use == "step" else self._on_host(window)

    @contextmanager
    def _on_device(self, window: OptimizerWindow) -> Iterator[None]:
        (self._coming.pop(id(window), None) or self._fetch(window)).wait()
        if window.following is not None:
            self._coming[id(window.following)] = self._fetch(window.following)
        try:
            yield
        finally:
            self._settle()
            self._leaving.append(self._send(window.weights))
            if window.following is None:
                self._settle()

    @contextmanager
    def _on_host(self, window: OptimizerWindow) -> Iterator[None]:
        """Show the buffers to a checkpoint that is loaded; one that is saved may outlive the next step and gets copies."""
        saved = window.use == "save"
        resting = [(member, member.moments, self._buffers.get(member, {})) for member in window.weights]
        for member, moments, buffers in resting:
            if member.residual is None and _MAIN in buffers:
                member.expose(buffers[_MAIN].clone() if saved else buffers[_MAIN])
            if saved:
                _place(member, {name: value.clone() for name, value in moments.items()})
        try:
            yield
        finally:
            for member, moments, _ in resting:
                member.conceal()
                if saved:
                    _place(member, moments)
            if not saved:
                self._send(window.weights).wait()

    def _settle(self) -> None:
        for moved in self._leaving:
            moved.wait()
        self._leaving.clear()

    def _fetch(self, window: OptimizerWindow) -> _Moved:
        """Begin to bring a window to the device."""
        moved = _Moved()
        for member in window.weights:
            buffers = self._buffers.get(member, {})
            for name, buffer in buffers.items():
                if name == _MAIN:
                    member.restore()
                    moved.add(buffer, member.main)
                elif _resting(member).get(name) is buffer:
                    device = torch.empty(buffer.shape, dtype=buffer.dtype, device=member.main.device)
                    moved.add(buffer, device, partial(_place, member, {name: device}))
        return moved.start(TO_DEVICE)

    def _send(self, weights: Iterable[MainWeight]) -> _Moved:
        """Begin to bring what is not there yet to the host."""
        moved = _Moved()
        for member in weights:
            buffers = self._buffers.setdefault(member, {})
            tensors = _resting(member)
            if member.residual is not None:
                buffers.pop(_MAIN, None)
                member.copy = None
            elif member.weight is not None and not member.is_parked:
                tensors[_MAIN] = member.main
            for name, value in tensors.items():
                buffer = buffers.get(name)
                if buffer is value:
                    continue
                if buffer is None:
                    buffer = buffers[name] = host_tensor(value.shape, value.dtype)
                if name == _MAIN:
                    member.copy = buffer
                away = partial(member.park, _nothing) if name == _MAIN else partial(_place, member, {name: buffer})
                moved.add(value, buffer, away)
        return moved.start(TO_HOST)


class _Moved:
    """Tensors that travel together, and what is done when they have arrived."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._arrived: list[Callable[[], object]] = []
        self._transfer: Any = None

    def add(self, source: Tensor, target: Tensor, arrived: Callable[[], object] | None = None) -> None:
        self._pairs.append((source.detach(), target.detach()))
        if arrived is not None:
            self._arrived.append(arrived)

    def start(self, kind: str) -> _Moved:
        self._transfer = transfers.transfer(self._pairs, kind)
        return self

    def wait(self) -> None:
        self._transfer.wait()
        for place in self._arrived:
            place()
        self._pairs.clear()
        self._arrived.clear()


def _resting(member: MainWeight) -> dict[str, Tensor]:
    """The tensors of a parameter that have a buffer beside its main weights, wherever they are."""
    residual = {} if member.residual is None else {_RESIDUAL: member.residual}
    return residual | member.moments


def _place(member: MainWeight, tensors: dict[str, Tensor]) -> None:
    """Put tensors in the place of a parameter's residual and states."""
    member.residual = tensors.get(_RESIDUAL, member.residual)
    state = {name: value for name, value in tensors.items() if name != _RESIDUAL}
    if state:
        member.optimizer.state[member.main].update(state)


def _nothing(main: Tensor) -> None:
    """Leave main weights to a transfer that fills them."""
