"""Megatron's linear layers with the products and collectives of a feature, and their place in its specs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Final

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from mindspeed.megatron.module_specs import class_for, with_parts
from mindspeed.plugins import Feature
from mindspeed.tensor_parallel.linear import Products, linear
from mindspeed.tensor_parallel.weight_gradient import weight_gradient


class ColumnLinear(ColumnParallelLinear, ABC):  # type: ignore[misc]  # megatron has no types
    """Megatron's layer with a different product: weights, bias, gather of the output and checkpoints are unchanged."""

    @abstractmethod
    def products(self, sequence_parallel: bool) -> Products | None:
        """The products and collectives of this layer; None leaves it as Megatron has it."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Multiply as Megatron's forward pass asks for: it prepares the input and gathers the output where that is set."""
        megatrons = _is_megatrons(self) or kwargs.get("grad_output_buffer") is not None
        products = None if megatrons or args else self.products(kwargs["sequence_parallel"])
        if products is None:
            output: Tensor = super()._forward_impl(input, weight, *args, **kwargs)
            return output
        gradient = weight_gradient(weight, kwargs["gradient_accumulation_fusion"])
        return linear(input, weight, kwargs["bias"], products, gradient)


class RowLinear(RowParallelLinear, ABC):  # type: ignore[misc]
    """Megatron's layer, but for its product and the sum over ranks."""

    @abstractmethod
    def products(self, sequence_parallel: bool) -> Products | None:
        """The products and collectives of this layer; None leaves it as Megatron has it."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Multiply ``input_`` [sequence, batch, hidden of this rank]; the bias is added, or returned with skip_bias_add."""
        megatrons = _is_megatrons(self) or not self.input_is_parallel
        products = None if megatrons else self.products(self.sequence_parallel)
        if products is None:
            result: tuple[Tensor, Tensor | None] = super().forward(input_)
            return result
        gradient = weight_gradient(self.weight, self.gradient_accumulation_fusion)
        output = linear(input_, self.weight, None, products, gradient)
        if self.skip_bias_add:
            return output, self.bias
        return (output if self.bias is None else output + self.bias), None


def _is_megatrons(layer: Any) -> bool:
    """Return whether a layer stays as Megatron has it: that of an expert, or one whose weight other ranks hold parts of."""
    return bool(layer.is_expert or layer.explicit_expert_comm or getattr(layer, "gtp_remat_size", 1) > 1)


_KEPT: Final = ("linear_q_down_proj", "linear_kv_down_proj")
"""Places in a spec whose class multi-latent attention compares with Megatron's own."""


def with_linear_layers(spec: Any, column: type, row: type) -> Any:
    """Exchange the linear layers of a block's spec."""
    exchange = {ColumnParallelLinear: column, RowParallelLinear: row}

    def exchanged(name: str, part: Any) -> Any:
        return class_for(part, exchange) if isinstance(part, type) and name not in _KEPT else part

    return with_parts(spec, exchanged)


def missing_linear_layers(feature: Feature[Any], spec: Any, config: Any) -> Iterator[str]:
    """Say that a block's spec has none of Megatron's linear layers; one without layers has none to exchange."""
    if getattr(spec, "layer_specs", None) != [] and with_linear_layers(spec, ColumnLinear, RowLinear) is spec:
        yield "no layer of the model is Megatron's ColumnParallelLinear or RowParallelLinear"
