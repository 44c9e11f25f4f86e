"""The attention of Megatron's layers on the host between forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from mindspeed.memory.model_layers import chosen_layers, model_region
from mindspeed.memory.parked import LayerPart
from mindspeed.memory.region import RegionPass
from mindspeed.memory.swap import LayerSwap

_CORE = "core_attention"


def swap_attention(
    swap: LayerSwap, chunk: Any, modules: Sequence[str], owner: str, count: int | None = None
) -> list[SwappedLayer]:
    """Swap the attention of the first ``count`` layers of a model chunk, or of all, but not of the one before the loss.

    The layers keep the handles of their hooks.
    """
    layers = chosen_layers([chunk], None, "self_attention")
    ends = any(getattr(module, "post_process", False) for module in chunk.modules())
    swapped: list[SwappedLayer] = []
    for number, layer in enumerate(layers):
        keeps = (ends and layer is layers[-1]) or (count is not None and number >= count)
        names = () if keeps else [name for name in modules if can_leave(layer, name)]
        swapped.append(SwappedLayer(swap, layer, names, owner, begins=number == 0))
    return swapped


def can_leave(layer: Any, name: str) -> bool:
    """Return whether the attention of a layer has a module whose input no other part needs."""
    from megatron.core.transformer.identity_op import IdentityOp

    return hasattr(layer.self_attention, name) and not (name == "linear_qkv" and isinstance(layer.input_layernorm, IdentityOp))


class SwappedLayer:
    """The hooks of one layer, which collect what the parts ``modules`` of its attention keep, and hand it over to the host.

    ``begins`` says that a forward pass of its chunk begins with this layer. Without modules it only keeps time for others.
    """

    def __init__(self, swap: LayerSwap, layer: Any, modules: Sequence[str], owner: str, begins: bool) -> None:
        self._swap = swap
        self._begins = begins
        self._region = model_region(owner, f"layer {layer.layer_number} self_attention")
        self.part: LayerPart = self._region.part
        self.part.active = bool(modules)
        self.handles = list(self._hooks(layer, modules))
        self._pass: RegionPass | None = None
        self._storages: dict[int, UntypedStorage] = {}
        self._left = False

    def _hooks(self, layer: Any, modules: Sequence[str]) -> Iterator[Any]:
        for name in modules:
            part: Any = getattr(layer.self_attention, name)
            if name == _CORE:
                yield part.register_forward_pre_hook(self._core_entered, with_kwargs=True)
                yield part.register_forward_hook(self._core_left)
            else:
                yield part.register_forward_pre_hook(self._linear_entered)
        if modules:
            yield layer.self_attention.register_forward_hook(self._attention_left)
        yield layer.register_forward_pre_hook(self._layer_entered)
        yield layer.register_forward_hook(self._layer_left)

    def _layer_entered(self, layer: Any, inputs: Any) -> None:
        self._storages.clear()
        self._left = False
        if self._begins:
            self._swap.begin_unless_begun()

    def _layer_left(self, layer: Any, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if torch.is_grad_enabled():
            self._swap.layer_ended(hidden, self._left)

    def _core_entered(self, core: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._pass = self._region.entered(partial(core.forward, **kwargs), *inputs)
        self._pass.__enter__()

    def _core_left(self, core: Any, inputs: Any, output: Any) -> None:
        pass_, self._pass = self._pass, None
        if pass_ is not None:
            pass_.__exit__()
            made = output if isinstance(output, tuple) else (output,)
            self._collect(pass_.saved_storages(*(tensor for tensor in made if isinstance(tensor, Tensor))))

    def _linear_entered(self, linear: Any, inputs: tuple[Any, ...]) -> None:
        if self.part.active and torch.is_grad_enabled() and inputs[0].grad_fn is not None:
            self._collect([inputs[0].untyped_storage()])

    def _collect(self, storages: Sequence[UntypedStorage]) -> None:
        self._storages |= {storage._cdata: storage for storage in storages}

    def _attention_left(self, attention: Any, inputs: Any, output: Any) -> None:
        storages, self._storages = list(self._storages.values()), {}
        hidden = output[0] if isinstance(output, tuple) else output
        if storages and hidden.requires_grad:
            self._swap.leave(storages, hidden, self.part)
            self._left = True
