"""Megatron's linear layer whose weight gradient waits in a queue."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers
from torch import Tensor, UntypedStorage

from mindspeed.ops.process_groups import PendingCollective, post_all_gather
from mindspeed.pipeline.recomputation import Unit
from mindspeed.pipeline.running_step import running_step
from mindspeed.pipeline.weight_gradients import QueuedTensor
from mindspeed.tensor_parallel.weight_gradient import added_to_buffer

Linear = Callable[..., Tensor]


class Queue(Protocol):
    """The place where products wait."""

    def push(self, unit: Unit, product: LinearProduct) -> None:
        """Append a product of a unit."""

    def run_behind(self) -> None:
        """Run a product that is due while a collective is under way."""


@dataclass(slots=True)
class LinearCall:
    """A call of a linear layer: everything except its input and its bias."""

    original: Linear
    queue: Queue
    unit: Unit
    weight: Tensor
    fused: bool
    allreduce: bool
    sequence_parallel: bool
    group: Any


class LinearProduct:
    """Weight gradient of a linear layer: ``grad_output^T input``, the input gathered under sequence parallelism."""

    def __init__(self, call: LinearCall, given: Tensor, grad_output: Tensor) -> None:
        self.weight = call.weight
        self._call = call
        self._input = QueuedTensor(given)
        self._grad_output = QueuedTensor(grad_output)
        self._gather: PendingCollective | None = None

    def storages(self) -> list[UntypedStorage]:
        """Return the storages of the input and of the output gradient."""
        return [self._input.tensor.untyped_storage(), self._grad_output.tensor.untyped_storage()]

    def prepare(self) -> None:
        """Start to gather the input over the sequence."""
        if not self._call.sequence_parallel or self._gather is not None:
            return
        self._gather = post_all_gather(self._call.group, self._input.take())

    def add(self, before: Tensor | None) -> Tensor | None:
        """Compute the gradient as Megatron does, in its fused buffer where the weight has one."""
        total = self._input.take()
        if self._gather is not None:
            total = self._gather.wait()
        grad_output, total = layers.prepare_input_tensors_for_wgrad_compute(self._grad_output.take(), total)
        if not self._call.fused:
            gradient = grad_output.t().matmul(total)
            return gradient if before is None else before.add_(gradient)
        return added_to_buffer(self.weight, grad_output, total)


class InputGradient(torch.autograd.Function):
    """Linear layer whose backward pass computes the gradients of input and bias alone.

    The weight is no argument: Megatron's hook on a weight fires even for a gradient None, and here it must fire at W.
    """

    @staticmethod
    def forward(ctx: Any, given: Tensor, bias: Tensor | None, call: LinearCall) -> Tensor:
        ctx.save_for_backward(given)
        ctx.call = call
        ctx.use_bias = bias is not None
        detached = None if bias is None else bias.detach()
        flags = (False, call.allreduce, call.sequence_parallel)
        return call.original(given, call.weight.detach(), detached, *flags, tp_group=call.group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (grad_output,) = gradients
        (given,) = ctx.saved_tensors
        call: LinearCall = ctx.call
        grad_input = grad_output.matmul(call.weight)
        result, work = grad_input, None
        if call.allreduce:
            work = dist.all_reduce(grad_input, group=call.group, async_op=True)
        elif call.sequence_parallel:
            result = torch.empty_like(given)
            work = layers.dist_reduce_scatter_func(result, grad_input, group=call.group, async_op=True)
        call.queue.push(call.unit, LinearProduct(call, given, grad_output))
        grad_bias = grad_output.reshape(-1, grad_output.shape[-1]).sum(dim=0) if ctx.use_bias else None
        if work is not None:
            call.queue.run_behind()
            work.wait()
        return result, grad_bias, None


def with_waiting_gradient(
    original: Linear,
    queue: Queue,
    unit: Unit,
    given: tuple[Tensor, Tensor, Tensor | None, bool, bool, bool],
    tp_group: Any = None,
    **more: Any,
) -> Tensor:
    """Multiply as ``original`` does with ``given``; where it is differentiated, the gradient of the weight waits in a queue."""
    input, weight, bias, fused, reduced, sequence_parallel = given
    if not (torch.is_grad_enabled() and (input.requires_grad or (bias is not None and bias.requires_grad))):
        return original(*given, tp_group=tp_group, **more)
    group = layers.get_tensor_model_parallel_group_if_none(tp_group)
    call = LinearCall(original, queue, unit, weight, fused, reduced, sequence_parallel, group)
    output: Tensor = InputGradient.apply(input, bias, call)  # type: ignore[no-untyped-call]
    return output


def with_queue(original: Linear) -> Linear:
    """Wrap ``linear_with_grad_accumulation_and_async_allreduce``: the gradient of a weight waits in the queue of the step.

    Outside of a step with operations W, and for weights that do not wait, it is Megatron's function.
    """

    @functools.wraps(original)
    def linear(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        *rest: Any,
        tp_group: Any = None,
        **more: Any,
    ) -> Tensor:
        queue = running_step().queue
        unit = queue.unit_of(weight) if queue is not None else None
        given = (input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel)
        if queue is None or unit is None or rest:
            return original(*given, *rest, tp_group=tp_group, **more)
        return with_waiting_gradient(original, queue, unit, given, tp_group, **more)

    return linear
