"""Feed-forward network with one or several experts: ``y = act(x W1 + b1) W2 + b2``, also with int8 weights.

Computed in fp32 (fp64 for fp64 input) and rounded once. Forward only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mindspeed.ops.activations import GATED, PLAIN, activate
from mindspeed.ops.autocast import in_autocast_type
from mindspeed.ops.errors import require
from mindspeed.ops.group_list import group_ranges
from mindspeed.ops.npu_matmul_add_fp32 import wide_product
from mindspeed.ops.numerics import dequantized, float_scale, integer_product, to_int8, wide
from mindspeed.ops.registration import define, no_gradient

_EXPERTS = 256


class Quantization(NamedTuple):
    """The optional tensors of int8 weights, in the order of the schema."""

    scale: Tensor | None
    offset: Tensor | None
    deq_scale1: Tensor | None
    deq_scale2: Tensor | None
    antiquant_scale1: Tensor | None
    antiquant_scale2: Tensor | None
    antiquant_offset1: Tensor | None
    antiquant_offset2: Tensor | None


@in_autocast_type("x", "weight1", "weight2", "bias1", "bias2")
def ffn(
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    activation: str,
    *,
    expert_tokens: Sequence[int] | None = None,
    expert_tokens_index: Sequence[int] | None = None,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    deq_scale1: Tensor | None = None,
    deq_scale2: Tensor | None = None,
    antiquant_scale1: Tensor | None = None,
    antiquant_scale2: Tensor | None = None,
    antiquant_offset1: Tensor | None = None,
    antiquant_offset2: Tensor | None = None,
    inner_precise: int = 0,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Two linear layers with an activation between them.

    ``x`` is [..., K1], ``weight1`` [K1, N1] and ``weight2`` [K2, N2], or [E, K1, N1] and [E, K2, N2] with ``expert_tokens``
    (tokens of each expert) or ``expert_tokens_index`` (their cumulative ends); biases are [N] or [E, N]. K2 is N1, or half
    of it for geglu, swiglu and reglu, which activate the first half. Gives [..., N2] in the type of ``x``.

    int8 ``x`` and weights: ``((q(act((x W1 + b1) deq_scale1) scale + offset) W2 + b2) deq_scale2``, biases int32, the result of
    ``output_dtype`` (fp16 unless given). int8 weights alone: ``W = (W + antiquant_offset) antiquant_scale`` per channel or per
    group of rows. ``inner_precise`` changes nothing. Raises OperatorError for others.
    """
    op, name = "ffn", activation.lower()
    require(name in PLAIN or name in GATED, op, f"activation is {activation}, but must be one of {', '.join([*PLAIN, *GATED])}")
    both = expert_tokens is not None and expert_tokens_index is not None
    require(not both, op, "expert_tokens and expert_tokens_index are both given, but only one is allowed")
    tokens = expert_tokens if expert_tokens_index is None else expert_tokens_index
    rank = 2 if tokens is None else 3
    fits = x.dim() >= 1 and weight1.dim() == weight2.dim() == rank and x.shape[-1] == weight1.shape[-2]
    shapes = f"x, weight1 and weight2 have shapes {tuple(x.shape)}, {tuple(weight1.shape)} and {tuple(weight2.shape)}"
    require(fits, op, f"{shapes}, but the weights must have {rank} dimensions and the columns of x must match weight1")
    inner = weight1.shape[-1] // 2 if name in GATED else weight1.shape[-1]
    halves = weight1.shape[-1] % 2 == 0 or name not in GATED
    require(halves and weight2.shape[-2] == inner, op, f"{shapes}, but {name} gives {inner} columns to weight2")
    if tokens is not None:
        experts = len(tokens)
        same = 0 < experts <= _EXPERTS and weight1.shape[0] == weight2.shape[0] == experts
        require(
            same, op, f"{experts} experts have tokens, but the weights have {weight1.shape[0]} and {weight2.shape[0]} experts"
        )
    leading = () if tokens is None else (weight1.shape[0],)
    for which, bias, weight in (("bias1", bias1, weight1), ("bias2", bias2, weight2)):
        shape = (*leading, weight.shape[-1])
        require(bias is None or tuple(bias.shape) == shape, op, f"{which} must have shape {shape}")
    antiquant = (antiquant_scale1, antiquant_scale2, antiquant_offset1, antiquant_offset2)
    quantization = Quantization(scale, offset, deq_scale1, deq_scale2, *antiquant)
    _check_types(x, weight1, weight2, quantization)
    dtype = output_dtype or (torch.float16 if x.dtype == torch.int8 else x.dtype)
    groups = None if tokens is None else [int(n) for n in tokens]
    cumulative = expert_tokens_index is not None
    tensors = (x, weight1, weight2, bias1, bias2, *quantization)
    y: Tensor = torch.ops.mindspeed.ffn(*tensors, name, groups, cumulative, dtype)
    return y


npu_ffn = ffn


def _check_types(x: Tensor, weight1: Tensor, weight2: Tensor, quantization: Quantization) -> None:
    types = f"x, weight1 and weight2 are {x.dtype}, {weight1.dtype} and {weight2.dtype}"
    require(weight1.dtype == weight2.dtype, "ffn", f"{types}, but the weights must have one type")
    if x.dtype == torch.int8:
        needed = (quantization.scale, quantization.deq_scale1, quantization.deq_scale2)
        given = weight1.dtype == torch.int8 and all(t is not None for t in needed)
        require(given, "ffn", f"{types}, but int8 needs int8 weights, scale, deq_scale1 and deq_scale2")
    elif weight1.dtype == torch.int8:
        given = quantization.antiquant_scale1 is not None and quantization.antiquant_scale2 is not None
        require(given, "ffn", f"{types}, but int8 weights need antiquant_scale1 and antiquant_scale2")
    else:
        require(
            x.is_floating_point() and x.dtype == weight1.dtype, "ffn", f"{types}, but they must have one floating-point type"
        )


def _expert(x: Tensor, weights: list[Tensor], biases: list[Tensor | None], how: Quantization, name: str) -> Tensor:
    """Pass the tokens [M, K1] of one expert through its two layers, in a wide type."""
    if x.dtype == torch.int8:
        hidden = integer_product(x, weights[0])
        hidden = hidden if biases[0] is None else hidden + biases[0]
        hidden = activate(hidden.float() * _given(how.deq_scale1), name) * _given(how.scale)
        hidden = to_int8(hidden if how.offset is None else hidden + how.offset.float())
        y = integer_product(hidden, weights[1])
        return (y if biases[1] is None else y + biases[1]).float() * _given(how.deq_scale2)
    y = x
    scales = ((how.antiquant_scale1, how.antiquant_offset1), (how.antiquant_scale2, how.antiquant_offset2))
    for layer, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        antiquant, offset = scales[layer]
        if layer == 0 and antiquant is None:
            y = wide_product(x, weight)
        else:
            y = wide(y) @ (wide(weight) if antiquant is None else dequantized(weight, antiquant, offset))
        y = y if bias is None else y + wide(bias)
        y = activate(y, name) if layer == 0 else y
    return y


def _given(scale: Tensor | None) -> Tensor:
    require(scale is not None, "ffn", "int8 needs scale, deq_scale1 and deq_scale2, and one is missing")
    return float_scale(scale)  # type: ignore[arg-type]  # require has raised


def _forward(x: Tensor, weight1: Tensor, weight2: Tensor, bias1: Tensor | None, bias2: Tensor | None, *rest: object) -> Tensor:
    how, (name, groups, cumulative, dtype) = Quantization(*rest[:8]), rest[8:]  # type: ignore[arg-type]
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if groups is None:
        y = _expert(rows, [weight1, weight2], [bias1, bias2], how, str(name))
        return y.to(dtype).view(*x.shape[:-1], weight2.shape[-1])  # type: ignore[call-overload,no-any-return]
    out: Tensor = x.new_empty((rows.shape[0], weight2.shape[-1]), dtype=dtype)  # type: ignore[call-overload]
    experts = weight1.shape[0]
    ranges = group_ranges("ffn", torch.tensor(groups), rows.shape[0], bool(cumulative))
    for e, (start, end) in enumerate(ranges):
        own = Quantization(*(t[e] if t is not None and t.dim() > 0 and t.shape[0] == experts else t for t in how))
        biases = [None if bias is None else bias[e] for bias in (bias1, bias2)]
        out[start:end] = _expert(rows[start:end], [weight1[e], weight2[e]], biases, own, str(name))
    return out.view(*x.shape[:-1], weight2.shape[-1])


def _shape(x: Tensor, weight1: Tensor, weight2: Tensor, *rest: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight2.shape[-1]), dtype=rest[-1])  # type: ignore[call-overload,no-any-return]


def _operations(x: Tensor, weight1: Tensor, weight2: Tensor, *rest: object) -> int:
    rows = math.prod(x.shape[:-1])
    return 2 * rows * (weight1.shape[-2] * weight1.shape[-1] + weight2.shape[-2] * weight2.shape[-1])


define(
    "ffn(Tensor x, Tensor weight1, Tensor weight2, Tensor? bias1, Tensor? bias2, Tensor? scale, Tensor? offset, "
    "Tensor? deq_scale1, Tensor? deq_scale2, Tensor? antiquant_scale1, Tensor? antiquant_scale2, Tensor? antiquant_offset1, "
    "Tensor? antiquant_offset2, str activation, int[]? groups, bool cumulative, ScalarType dtype) -> Tensor",
    _forward,
    _shape,
    gradient=no_gradient("ffn"),
    operations=_operations,
)
