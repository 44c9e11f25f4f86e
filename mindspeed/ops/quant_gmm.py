"""Grouped product of int8 matrices: ``y = act((x_e W_e + bias_e) scale_e per_token)``, integer sums exact.

Everything after the sum is computed in fp32 and rounded once. Forward only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed.ops.activations import fast_gelu, gelu_tanh
from mindspeed.ops.errors import require
from mindspeed.ops.group_list import group_ranges, group_tensor
from mindspeed.ops.numerics import float_scale, integer_product, to_int8
from mindspeed.ops.registration import define, product_operations

ACTIVATIONS: Final = {0: lambda y: y, 1: F.relu, 2: gelu_tanh, 4: fast_gelu, 5: F.silu}
_SCALES: Final = (torch.int64, torch.bfloat16, torch.float32)
_OUTPUTS: Final = (torch.int8, torch.bfloat16, torch.float16)


class QuantizedProduct(NamedTuple):
    """The arguments of the operator, in the order of the schema."""

    x: Tensor
    weight: Tensor
    scale: Tensor
    per_token: Tensor | None
    bias: Tensor | None
    groups: Tensor
    dtype: torch.dtype
    activation: int
    cumulative: bool


def quant_gmm(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    per_token_scale: Tensor | None = None,
    bias: Tensor | None = None,
    group_list: Tensor | Sequence[int],
    output_dtype: torch.dtype = torch.bfloat16,
    act_type: int = 0,
) -> Tensor:
    """Grouped product with ``group_list`` the cumulative ends of the groups.

    ``x`` int8 [M, K], ``weight`` int8 [E, K, N], ``scale`` [E, N] (bf16, fp32, or int64 with the bits of fp32), ``bias`` int32
    [E, N], ``per_token_scale`` fp32 [M]; ``act_type`` 0 none, 1 relu, 2 gelu by tanh, 4 gelu by sigmoid, 5 silu. Gives [M, N]
    of ``output_dtype``: bf16, fp16, or int8, which takes neither activation nor per_token_scale. ``offset`` must be None.
    Raises OperatorError for others.
    """
    groups = group_tensor("quant_gmm", group_list)
    inputs = QuantizedProduct(x, weight, scale, per_token_scale, bias, groups, output_dtype, act_type, True)
    return _checked("quant_gmm", inputs, offset)


def npu_quant_gmm_v2(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    per_token_scale: Tensor | None = None,
    bias: Tensor | None = None,
    group_list: Tensor | Sequence[int],
    output_dtype: torch.dtype = torch.bfloat16,
    act_type: int = 0,
) -> Tensor:
    """Grouped product with ``group_list`` the size of each group; else as `quant_gmm`."""
    groups = group_tensor("npu_quant_gmm_v2", group_list)
    inputs = QuantizedProduct(x, weight, scale, per_token_scale, bias, groups, output_dtype, act_type, False)
    return _checked("npu_quant_gmm_v2", inputs, offset)


npu_quant_gmm = quant_gmm


def _checked(op: str, inputs: QuantizedProduct, offset: Tensor | None) -> Tensor:
    x, weight, scale, per_token, bias, groups, dtype, activation, _ = inputs
    integers = x.dtype == weight.dtype == torch.int8
    require(integers, op, f"x is {x.dtype} and weight is {weight.dtype}, but both must be torch.int8")
    fits = x.dim() == 2 and weight.dim() == 3 and x.shape[1] == weight.shape[1]
    require(fits, op, f"x of shape {tuple(x.shape)} and weight of shape {tuple(weight.shape)} cannot be multiplied")
    experts, shape = groups.shape[0], (weight.shape[0], weight.shape[2])
    require(weight.shape[0] == experts, op, f"weight has {weight.shape[0]} matrices, but group_list has {experts} groups")
    scales = tuple(scale.shape) == shape and scale.dtype in _SCALES
    require(
        scales, op, f"scale is {scale.dtype} of shape {tuple(scale.shape)}, but must be int64, bf16 or fp32 of shape {shape}"
    )
    biased = bias is None or (tuple(bias.shape) == shape and bias.dtype == torch.int32)
    require(biased, op, f"bias must be int32 of shape {shape}")
    tokens = per_token is None or (tuple(per_token.shape) == x.shape[:1] and per_token.dtype == torch.float32)
    require(tokens, op, f"per_token_scale must be fp32 of shape {tuple(x.shape[:1])}")
    require(offset is None, op, "offset is reserved and must be None")
    require(dtype in _OUTPUTS, op, f"output_dtype is {dtype}, but must be int8, bf16 or fp16")
    require(activation in ACTIVATIONS, op, f"act_type is {activation}, but must be one of {', '.join(map(str, ACTIVATIONS))}")
    plain = dtype != torch.int8 or (per_token is None and activation == 0)
    require(plain, op, "an int8 result supports neither per_token_scale nor activation")
    y: Tensor = torch.ops.mindspeed.quant_gmm(*inputs)
    return y


def _forward(*args: Any) -> Tensor:
    x, weight, scale, per_token, bias, groups, dtype, activation, cumulative = QuantizedProduct(*args)
    out = x.new_empty((x.shape[0], weight.shape[2]), dtype=dtype)
    scales = float_scale(scale)
    for e, (start, end) in enumerate(group_ranges("quant_gmm", groups, x.shape[0], cumulative)):
        total = integer_product(x[start:end], weight[e])
        y = (total if bias is None else total + bias[e]).float() * scales[e]
        y = ACTIVATIONS[activation](y if per_token is None else y * per_token[start:end, None])
        out[start:end] = to_int8(y) if dtype == torch.int8 else y
    return out


def _shape(x: Tensor, weight: Tensor, scale: Tensor, *rest: object) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[2]), dtype=rest[3])  # type: ignore[call-overload,no-any-return]


define(
    "quant_gmm(Tensor x, Tensor weight, Tensor scale, Tensor? per_token, Tensor? bias, Tensor groups, ScalarType dtype, "
    "int activation, bool cumulative) -> Tensor",
    _forward,
    _shape,
    operations=product_operations,
)
