"""The output of core attention on the host between forward and backward.

The copy to the host overlaps with the rest of the layer in forward, and the copy back with it in backward. A layer needs no
knowledge of other passes, so schedules may take passes in turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mindspeed.memory.on_host import HostBuffers, OnHost
from mindspeed.memory.parked import LayerPart, Parked


class OffloadedOutput:
    """Offload the input of a layer's ``linear_proj``, which is the output of core attention. ``handles`` are its hooks."""

    def __init__(self, layer: Any, buffers: HostBuffers, owner: str) -> None:
        self._buffers = buffers
        self._part = LayerPart(owner, f"layer {layer.layer_number} self_attention")
        self._leaving: Parked | None = None
        self.handles = list(self._hooks(layer))

    def _hooks(self, layer: Any) -> Iterator[Any]:
        yield layer.self_attention.linear_proj.register_forward_pre_hook(self._entered)
        yield layer.self_attention.linear_proj.register_forward_hook(self._left)
        yield layer.register_forward_hook(self._layer_ended)

    def _entered(self, linear: Any, inputs: tuple[Tensor, ...]) -> None:
        self._leaving = None
        if torch.is_grad_enabled() and inputs[0].requires_grad:
            storages = [inputs[0].untyped_storage()]
            self._leaving = Parked(storages, OnHost(storages, self._buffers), self._part)

    def _left(self, linear: Any, inputs: Any, output: tuple[Tensor, Any]) -> None:
        if (parked := self._leaving) is not None:
            output[0].register_hook(lambda gradient: parked.wait())  # type: ignore[no-untyped-call]

    def _layer_ended(self, layer: Any, inputs: Any, output: Any) -> None:
        parked, self._leaving = self._leaving, None
        if parked is None:
            return
        parked.park()
        hidden = output[0] if isinstance(output, tuple) else output
        hidden.register_hook(lambda gradient: parked.post())
