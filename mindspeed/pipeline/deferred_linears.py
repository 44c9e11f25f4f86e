"""Linear layers of plain torch whose weight gradients wait in a queue."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from mindspeed.pipeline.recomputation import Unit
from mindspeed.pipeline.weight_gradients import QueuedTensor, WeightGradients


class DeferredLinears(TorchFunctionMode):
    """Let ``torch.nn.functional.linear`` leave the gradients of ``weights`` in a queue, while the queue collects a unit.

    Gradients of inputs, biases and all other parameters are computed in the backward pass.
    """

    def __init__(self, queue: WeightGradients, weights: Collection[Tensor]) -> None:
        super().__init__()
        self._queue = queue
        self._weights = {id(weight) for weight in weights}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not functional.linear:
            return func(*args, **(kwargs or {}))
        return self._linear(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        unit = self._queue.unit_of(weight) if torch.is_grad_enabled() and id(weight) in self._weights else None
        if unit is None or not (input.requires_grad or (bias is not None and bias.requires_grad)):
            return functional.linear(input, weight, bias)
        device = input.device.type
        if torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))
        output: Tensor = _Deferred.apply(input, bias, _Call(weight, self._queue, unit))  # type: ignore[no-untyped-call]
        return output


@dataclass(slots=True)
class _Call:
    """The weight of a call, which is no input of its graph: its gradient arrives later."""

    weight: Tensor
    queue: WeightGradients
    unit: Unit


class _Deferred(torch.autograd.Function):
    """``functional.linear`` whose backward pass computes the gradients of input and bias."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
        ctx.save_for_backward(input)
        ctx.bias_type = None if bias is None else bias.dtype
        ctx.call = call
        return functional.linear(input, call.weight.detach(), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        (input,) = ctx.saved_tensors
        call: _Call = ctx.call
        call.queue.push(call.unit, _LinearProduct(call.weight, input, gradient))
        given = gradient.matmul(call.weight.to(gradient.dtype)) if ctx.needs_input_grad[0] else None
        bias = gradient.flatten(0, -2).sum(0).to(ctx.bias_type) if ctx.needs_input_grad[1] else None
        return given, bias, None


class _LinearProduct:
    """The weight gradient ``gradient^T input`` of one call."""

    def __init__(self, weight: Tensor, input: Tensor, gradient: Tensor) -> None:
        self.weight = weight
        self._input, self._gradient = QueuedTensor(input), QueuedTensor(gradient)

    def storages(self) -> list[UntypedStorage]:
        """Return the storages of the input and of the output gradient."""
        return [self._input.tensor.untyped_storage(), self._gradient.tensor.untyped_storage()]

    def prepare(self) -> None:
        """Do nothing: the product needs no communication."""

    def add(self, before: Tensor | None) -> Tensor:
        """Return the gradient, added to ``before``."""
        gradient, input = (queued.take().flatten(0, -2) for queued in (self._gradient, self._input))
        product = gradient.t().matmul(input).to(self.weight.dtype)
        return product if before is None else before.add_(product)


def accumulate(chunk: int, weight: Tensor, gradient: Tensor | None) -> None:
    """Add the gradient of a weight to its ``grad``, as autograd does, with its hooks."""
    with torch.enable_grad():
        torch.autograd.backward(weight, gradient)
