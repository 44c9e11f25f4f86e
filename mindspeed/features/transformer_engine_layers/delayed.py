"""Weight gradients that wait until `backward_dw` is called (``delay_wgrad_compute``)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor

from mindspeed.features.transformer_engine_layers import mxfp8
from mindspeed.features.transformer_engine_layers.interface import refuse
from mindspeed.pipeline.linear import LinearProduct, with_waiting_gradient
from mindspeed.pipeline.recomputation import Unit

_UNIT: Unit = (0, 0)
"""Every product of a layer is of one unit: a layer computes them in the order of its backward passes."""


class ProductQueue:
    """The products of one layer that wait, the oldest first."""

    def __init__(self) -> None:
        self.products: deque[LinearProduct] = deque()

    def push(self, unit: Unit, product: LinearProduct) -> None:
        """Append a product."""
        self.products.append(product)

    def run_behind(self) -> None:
        """Do nothing: products run in `backward_dw` alone."""

    @torch.no_grad()
    def run_first(self) -> None:
        """Compute the gradient of the oldest product and add it to that of its weight."""
        product = self.products.popleft()
        product.prepare()
        gradient, weight = product.add(None), product.weight
        if gradient is not None:
            weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)


class DelayedWeightGradients:
    """Mixin of the linear roles: with ``delay_wgrad_compute`` backward gives the gradient of the input alone."""

    _waiting: ProductQueue | None = None
    _hooks: list[Callable[[], Any]]

    def delay_weight_gradients(self, config: Any) -> None:
        """Defer the parameters where a configuration requests it; Megatron's data parallelism skips its hooks for them."""
        self._hooks = []
        if getattr(config, "delay_wgrad_compute", False):
            if getattr(config, "fp8", None):
                refuse(
                    type(self).__name__, "does not delay weight gradients of fp8 products", "set delay_wgrad_compute to False"
                )
            self._waiting = ProductQueue()
            for name, parameter in self.named_parameters():  # type: ignore[attr-defined]
                if name.startswith(("weight", "bias")):
                    parameter.skip_backward_post_hook = True

    @property
    def weight_gradients_wait(self) -> bool:
        """Return whether weight gradients wait for `backward_dw`."""
        return self._waiting is not None

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], Any]) -> None:
        """Call a function after each `backward_dw`: it hands a gradient to Megatron's data parallelism."""
        self._hooks.append(hook)

    def backward_dw(self) -> None:
        """Compute the weight gradients of the oldest backward pass that waits."""
        if self._waiting is None or not self._waiting.products:
            return
        self._run_waiting(self._waiting)
        for hook in self._hooks:
            hook()

    def _run_waiting(self, waiting: ProductQueue) -> None:
        waiting.run_first()

    def product(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: Any = None,
        **more: Any,
    ) -> Tensor:
        """Multiply as Megatron's linear layers do; the gradient of the weight waits where that is set."""
        given = (input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel)
        if (recipe := mxfp8.active()) is not None:
            return mxfp8.product(recipe, *given, tp_group)
        output: Tensor
        if not weight.requires_grad:
            output = layers.linear_with_frozen_weight(*given, tp_group=tp_group, **more)
            return output
        plain = layers.linear_with_grad_accumulation_and_async_allreduce
        if self._waiting is None:
            output = plain(*given, tp_group=tp_group, **more)
            return output
        return with_waiting_gradient(plain, self._waiting, _UNIT, given, tp_group, **more)
