"""Megatron's checkpoints whose forward pass runs again at operation R, or whose activations the list keeps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mindspeed.memory.checkpoint import Checkpoint
from mindspeed.memory.model_layers import tracker_state
from mindspeed.pipeline.recomputation import Unit
from mindspeed.pipeline.running_step import running_step
from mindspeed.plugins.patches import Function, wrapper


class Checkpoints:
    """The checkpoints of a rank in one step, by chunk and micro-batch. ``dropped`` are the units that are recomputed."""

    def __init__(self, dropped: frozenset[Unit]) -> None:
        self._dropped = dropped
        self._waiting: dict[Unit, list[Checkpoint]] = {}
        self._unit: Unit | None = None
        self.recomputed = 0
        """Units for which R has run."""

    @contextmanager
    def entered(self, unit: Unit) -> Iterator[None]:
        """Let the checkpoints of a forward pass belong to a unit."""
        self._unit = unit
        try:
            yield
        finally:
            self._unit = None

    @property
    def active(self) -> bool:
        return self._unit is not None

    def run(self, function: Function, inputs: tuple[Any, ...]) -> Any:
        """Call a function that Megatron checkpoints: with its activations where the list keeps them."""
        if self._unit is None or self._unit not in self._dropped:
            return function(*inputs)
        checkpoint = Checkpoint(function, inputs, [tracker_state()])
        self._waiting.setdefault(self._unit, []).append(checkpoint)
        return checkpoint.run()

    def restore(self, unit: Unit) -> None:
        """Run R: repeat the forward passes of a unit."""
        waiting = self._waiting.pop(unit, [])
        for checkpoint in waiting:
            checkpoint.restore()
        self.recomputed += bool(waiting)

    def forget(self, unit: Unit) -> None:
        """Leave a unit to its backward pass, which has restored what R did not."""
        self._waiting.pop(unit, None)

    def clear(self) -> None:
        """Forget the checkpoints of forward passes that are repeated."""
        self._waiting.clear()

    def __len__(self) -> int:
        return len(self._waiting)


@wrapper
def with_early_restore(original: Function, function: Function, distribute_saved_activations: bool, *args: Any) -> Any:
    """Wrap ``tensor_parallel.checkpoint(function, distribute_saved_activations, *args)``: R repeats its forward pass.

    What the list keeps is not recomputed. Outside of a step with operations R it is Megatron's function.
    """
    units = running_step().checkpoints
    if units is None or not units.active or distribute_saved_activations or not torch.is_grad_enabled():
        return original(function, distribute_saved_activations, *args)
    return units.run(function, args)
