"""Matrix products of fp8 operands with the scales of OCP's MX format, as in Transformer Engine's recipe MXFP8BlockScaling.

Operands are rounded to what the format stores and multiplied in the type of the layer. A stored number has at most four
significant bits and a power of two as its scale, so bf16 holds it exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from torch import Tensor
from torch.nn import functional

BLOCK: Final = 32
"""Numbers that share a scale, next to each other along the summed dimension of a product."""
_MANTISSA: Final = 23
_BIAS: Final = 127
"""Bits of fp32 behind the exponent, and the exponent of 1."""


@dataclass(frozen=True, slots=True)
class Mxfp8Recipe:
    """Hold the types in which operands of forward and gradients are stored."""

    forward: torch.dtype = torch.float8_e4m3fn
    backward: torch.dtype = torch.float8_e4m3fn

    @classmethod
    def of(cls, config: Any) -> Mxfp8Recipe:
        """Return the recipe of a configuration: ``fp8`` is e4m3, or hybrid with gradients in e5m2."""
        return cls(backward=torch.float8_e5m2) if config.fp8 == "hybrid" else cls()


_active: list[Mxfp8Recipe | None] = [None]


def active() -> Mxfp8Recipe | None:
    """Return the recipe of the code that runs, None where products keep their type."""
    return _active[-1]


@contextmanager
def quantized(recipe: Mxfp8Recipe | None) -> Iterator[None]:
    """Let linear layers multiply by a recipe in a with-block."""
    _active.append(recipe)
    try:
        yield
    finally:
        _active.pop()


def get_fp8_context(config: Any, layer_no: int = -1, is_init: bool = False) -> AbstractContextManager[None]:
    """Replace Megatron's function: weights are never made in fp8, and layers that stay in bf16 have no context."""
    from megatron.core import fp8_utils

    stays = getattr(fp8_utils, "is_first_last_bf16_layer", None)
    if is_init or not config.fp8 or (stays is not None and stays(config, layer_no)):
        return nullcontext()
    return quantized(Mxfp8Recipe.of(config))


def rounded(x: Tensor, kind: torch.dtype) -> Tensor:
    """Return what the format stores of ``x``, in the type of ``x``: blocks are along the last dimension.

    The scale of a block is the least power of two by which its largest number fits into ``kind``.
    """
    size = x.size(-1)
    padded = functional.pad(x.float(), (0, -size % BLOCK))
    blocks = padded.view(*padded.shape[:-1], padded.size(-1) // BLOCK, BLOCK)
    bits = (blocks.abs().amax(-1, keepdim=True) / torch.finfo(kind).max).view(torch.int32)
    exponents = (bits >> _MANTISSA) + (bits & ((1 << _MANTISSA) - 1) > 0)
    scales = (exponents.clamp(1, 2 * _BIAS) << _MANTISSA).view(torch.float32)
    stored = (blocks / scales).to(kind)
    whole: Tensor = (stored.float() * scales).flatten(-2)
    return whole[..., :size].to(x.dtype)


def rounded_across(x: Tensor, kind: torch.dtype) -> Tensor:
    """Return what the format stores of a matrix with blocks along its first dimension."""
    return rounded(x.t(), kind).t()


class _Product(torch.autograd.Function):
    """The product [..., in] x [out, in]; each of its three products rounds both operands along the dimension that it sums."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: Mxfp8Recipe, into_main: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe, ctx.into_main = recipe, into_main
        return functional.linear(rounded(x, recipe.forward), rounded(weight, recipe.forward))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        forward, backward = ctx.recipe.forward, ctx.recipe.backward
        dx = rounded(dy, backward) @ rounded_across(weight, forward) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return dx, None, None, None
        rows, columns = rounded_across(dy.flatten(0, -2), backward).t(), rounded_across(x.flatten(0, -2), forward)
        if not ctx.into_main:
            return dx, rows @ columns, None, None
        main = weight.main_grad
        main.add_(rows.to(main.dtype) @ columns.to(main.dtype))
        weight.grad_added_to_main_grad = True
        return (
            dx,
            torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight),
            None,
            None,
        )


def product(
    recipe: Mxfp8Recipe,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    into_main: bool,
    sum_gradients: bool,
    gathers: bool,
    group: Any,
) -> Tensor:
    """Multiply as Megatron's linear layers do, with rounded operands.

    With ``gathers`` the ranks of ``group`` have shares of the sequence; with ``sum_gradients`` each has the whole input and the
    gradient of a part of the output. ``into_main`` adds the gradient of the weight to its ``main_grad``.
    """
    if gathers:
        x = gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=group)
    elif sum_gradients:
        x = copy_to_tensor_model_parallel_region(x, group=group)
    into_main = into_main and weight.requires_grad
    output: Tensor = _Product.apply(x, weight, recipe, into_main)  # type: ignore[no-untyped-call]
    return output if bias is None else output + bias
