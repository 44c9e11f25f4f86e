"""Layers whose saved tensors are in host memory between forward and backward: `mindspeed.memory.swap` for plain modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mindspeed.memory.region import Region, RegionPass
from mindspeed.memory.swap import LayerSwap


class SwapActivations(AbstractContextManager["SwapActivations"]):
    """Offloads what each of ``layers``, called one after the other, saves for backward.

    A layer's tensors leave while the next layer runs and come back while backward of the next layer runs; those of the last
    layer stay. Results keep their bits. The output of a layer, or its first value, is read by the next layer alone. The first
    pass of a layer is computed twice, to tell what it makes from what it only reads (parameters, buffers, masks). Layers keep
    their names and types; `remove`, or the end of the context, takes the hooks away.

    >>> swap = SwapActivations(model.blocks)
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._swap = LayerSwap()
        self._handles = [handle for number, layer in enumerate(layers) for handle in self._hooks(layer, number)]

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def __exit__(self, *error: object) -> None:
        self.remove()

    def _hooks(self, layer: nn.Module, number: int) -> list[Any]:
        region = Region("swap-attention", module=f"layer {number}")
        passes: list[RegionPass] = []

        def entered(layer: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            if number == 0:
                self._swap.begin_step()
                self._swap.begin()
            forward: Callable[..., Any] = partial(layer.forward, **keywords)
            passes.append(region.entered(forward, *inputs).__enter__())

        def left(layer: nn.Module, inputs: Any, keywords: Any, output: Any) -> None:
            pass_ = passes.pop()
            pass_.__exit__()
            made = output if isinstance(output, tuple) else (output,)
            storages = pass_.saved_storages(*(value for value in made if isinstance(value, Tensor)))
            leaves = bool(storages) and made[0].requires_grad
            if leaves:
                self._swap.leave(storages, made[0], region.part)
            if torch.is_grad_enabled():
                self._swap.layer_ended(made[0], leaves)

        return [
            layer.register_forward_pre_hook(entered, with_kwargs=True),
            layer.register_forward_hook(left, with_kwargs=True),
        ]
