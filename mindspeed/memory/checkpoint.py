"""A checkpoint whose forward pass can be repeated early, before the gradient of its output arrives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed.memory.recomputation import RandomState, generators, recomputation, replayed


class Checkpoint:
    """Keep only the inputs of one call of a function.

    ``random`` are generators beside those of host and device; None is for a function that draws no random numbers. `restore`
    repeats the call with the random numbers of the first one; the backward pass does so itself where nobody did before.
    """

    def __init__(self, function: Callable[..., Any], inputs: Sequence[Any], random: Sequence[RandomState] | None = ()) -> None:
        self._function: Callable[..., Any] | None = function
        self._inputs = tuple(inputs)
        self._random = () if random is None else (*generators(), *random)
        self._states = [generator.get() for generator in self._random]
        self._graph: tuple[tuple[Any, ...], tuple[Any, ...]] | None = None
        self.restored = 0

    def run(self) -> Any:
        """Call the function without keeping its activations."""
        return _Checkpointed.apply(self, *self._inputs)  # type: ignore[no-untyped-call]

    def restore(self) -> None:
        """Repeat the call and keep its activations, once."""
        if self._graph is not None or self._function is None:
            return
        inputs = tuple(
            value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value for value in self._inputs
        )
        with recomputation(), torch.enable_grad(), replayed(self._random, self._states):
            outputs = self._function(*inputs)
        self._graph = inputs, outputs if isinstance(outputs, tuple) else (outputs,)
        self.restored += 1

    def call(self) -> Any:
        """Call the function of the inputs; `run` does so without a graph."""
        if self._function is None:
            raise RuntimeError("a checkpoint was used after its backward pass")
        return self._function(*self._inputs)

    def backward(self, gradients: Sequence[Any]) -> tuple[Any, ...]:
        """Run the backward pass of the repeated call and free it; return the gradients of the inputs."""
        self.restore()
        if self._graph is None:
            raise RuntimeError("a checkpoint was used after its backward pass")
        inputs, outputs = self._graph
        self._function = self._graph = None
        self._inputs = ()
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if isinstance(output, Tensor) and output.requires_grad
        ]
        torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        return tuple(value.grad if isinstance(value, Tensor) else None for value in inputs)


class _Checkpointed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, checkpoint: Checkpoint, *inputs: Any) -> Any:
        ctx.checkpoint = checkpoint
        return checkpoint.call()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, *ctx.checkpoint.backward(gradients)
