"""State that the first forward passes of a step change, to run them once more."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from mindspeed.memory.model_layers import tracker_state
from mindspeed.memory.recomputation import generators

_LOGGED: Final = {
    "megatron.core.parallel_state": "get_moe_layer_wise_logging_tracker",
    "megatron.core.transformer.moe.moe_utils": "get_moe_layer_wise_logging_tracker",
    "megatron.core.transformer.multi_token_prediction": "MTPLossLoggingHelper",
    "megatron.core.transformer.experimental_attention_variant.dsa": "DSAIndexerLossLoggingHelper",
}
"""Functions and classes that give the dictionaries in which forward passes sum losses for the log, in some release."""


class RepeatedForwards:
    """Everything that forward passes change, as it is now: random states, buffers of modules, logged losses and data.

    ``iterators`` are those of the chunks, which keep what they yield until `release`.
    """

    def __init__(self, chunks: Sequence[Any], iterators: Sequence[Any]) -> None:
        kept = {id(iterator): KeptIterator(iterator) for iterator in iterators if iterator is not None}
        self.iterators = [None if iterator is None else kept[id(iterator)] for iterator in iterators]
        self._kept = list(kept.values())
        self._random = [(state, state.get()) for state in (*generators(), tracker_state())]
        self._buffers = [(buffer, buffer.clone()) for chunk in chunks for buffer in torch.nn.Module.buffers(chunk)]
        self._logged = [(losses, tree_map_only(Tensor, torch.clone, losses)) for losses in _logged_losses()]

    def restore(self) -> None:
        """Undo what the forward passes since have changed."""
        for state, before in self._random:
            state.set(before)
        for buffer, value in self._buffers:
            buffer.copy_(value)
        for losses, before in self._logged:
            losses.clear()
            losses.update(before)
        for iterator in self._kept:
            iterator.rewind()

    def release(self) -> None:
        """Keep no more data: nothing is repeated from now on."""
        for iterator in self._kept:
            iterator.release()


class KeptIterator:
    """Iterator that can go back to where it began, until it is released."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self._kept: list[Any] | None = []
        self._again: list[Any] = []

    def __iter__(self) -> KeptIterator:
        return self

    def __next__(self) -> Any:
        value = self._again.pop(0) if self._again else next(self._iterator)
        if self._kept is not None:
            self._kept.append(copy(value))  # a forward step may take entries out of a batch
        return value

    def rewind(self) -> None:
        self._again, self._kept = [*(self._kept or ()), *self._again], []

    def release(self) -> None:
        self._kept = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


def _logged_losses() -> Iterator[dict[str, Any]]:
    for module, name in _LOGGED.items():
        source: Any = getattr(sys.modules.get(module), name, None)  # a module that is not imported has no sums
        if source is not None:
            yield source.tracker if hasattr(source, "tracker") else source()
