"""Count the bytes that a forward pass keeps for its backward pass."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch


class SavedActivations(AbstractContextManager["SavedActivations"]):
    """Counts, over its with-blocks, the storages that autograd saved and that still exist at the block's end.

    A storage that several operators saved counts once, parameters and their buffers do not.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self.bytes = 0
        self._modules = list(modules)
        self._saved: list[torch.Tensor] = []

    def __enter__(self) -> SavedActivations:
        self._hooks: Any = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)
        weights = {parameter.untyped_storage().data_ptr() for module in self._modules for parameter in module.parameters()}
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in self._saved}
        self.bytes += sum(size for start, size in storages.items() if start not in weights)
        self._saved.clear()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self._saved.append(tensor)
        return tensor
