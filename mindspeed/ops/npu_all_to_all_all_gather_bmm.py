"""Dispatch to experts and their first product: all-to-all over expert ranks, all-gather over tensor ranks, product, activation.

Product, bias and activation are computed in fp32 (fp64 for fp64 input); each result is rounded once. Forward only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed.ops.activations import PLAIN, activate
from mindspeed.ops.autocast import in_autocast_type
from mindspeed.ops.errors import require
from mindspeed.ops.npu_matmul_add_fp32 import wide_product
from mindspeed.ops.numerics import unflatten, wide
from mindspeed.ops.process_groups import Group, all_gather, all_to_all, name_of_size, size_of
from mindspeed.ops.registration import define, no_gradient


@in_autocast_type("x", "weight", "bias")
def npu_all_to_all_all_gather_bmm(
    x: Tensor,
    weight: Tensor,
    group_ep: Group,
    group_ep_worldsize: int,
    group_tp: Group,
    group_tp_worldsize: int,
    *,
    bias: Tensor | None = None,
    shard_type: int = 0,
    act_type: str = "None",
    need_allgather_out: bool = False,
    need_activation_feature: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Give ``y1``, then ``y2`` if ``need_allgather_out``, then ``y3`` if ``need_activation_feature`` and it differs.

    ``x`` is [E, C, H / tp] (``shard_type`` 0) or [E, C / tp, H] (1), ``weight`` [E / ep, H, M / tp], ``bias`` [E / ep, M / tp]
    or [E / ep, 1, M / tp]. ``y2`` [E / ep, ep C, H] holds all the rows, by expert rank, then tensor rank for shard_type 1;
    ``y3 = y2 weight + bias`` and ``y1 = act(y3)``, act none, gelu, silu, relu or fastgelu. Raises OperatorError for others.
    """
    op, name = "npu_all_to_all_all_gather_bmm", act_type.lower()
    ep, tp = name_of_size(op, group_ep, group_ep_worldsize), name_of_size(op, group_tp, group_tp_worldsize)
    require(name == "none" or name in PLAIN, op, f"act_type is {act_type}, but must be one of none, {', '.join(PLAIN)}")
    check_operands(op, x, weight, shard_type)
    width = x.shape[-1] * (group_tp_worldsize if shard_type == 0 else 1) if x.dim() == 3 else -1
    fits = weight.dim() == 3 and weight.shape[1] == width and x.shape[0] == weight.shape[0] * group_ep_worldsize
    ranks = f"{group_ep_worldsize} expert and {group_tp_worldsize} tensor ranks"
    require(fits, op, f"x of shape {tuple(x.shape)} and weight of shape {tuple(weight.shape)} do not match {ranks}")
    flat = bias_by_expert(op, bias, weight.shape[0], weight.shape[2])
    y1, y2, y3 = torch.ops.mindspeed.npu_all_to_all_all_gather_bmm(x, weight, flat, ep, tp, shard_type, name)
    results: tuple[Tensor, ...] = (y1,)
    results += (y2,) if need_allgather_out else ()
    results += (y3,) if need_activation_feature and name != "none" else ()
    return results if len(results) > 1 else results[0]


def check_operands(op: str, x: Tensor, weight: Tensor, shard_type: int) -> None:
    """Refuse other types and another ``shard_type`` than products of experts have."""
    require(shard_type in (0, 1), op, f"shard_type is {shard_type}, but must be 0 (width) or 1 (rows)")
    types = f"x is {x.dtype}, but weight is {weight.dtype}"
    require(x.dtype == weight.dtype and x.is_floating_point(), op, f"{types}, but they must have one floating-point type")


def bias_by_expert(op: str, bias: Tensor | None, experts: int, columns: int) -> Tensor | None:
    """A bias [experts, columns], or that with a 1 in the middle, as the latter. Raises OperatorError for others."""
    shapes = ((experts, columns), (experts, 1, columns))
    require(bias is None or tuple(bias.shape) in shapes, op, f"bias must have shape {shapes[0]} or {shapes[1]}")
    return None if bias is None else bias.reshape(shapes[1])


def _gathered_rows(x: Tensor, weight: Tensor, ep: str, tp: str, shard_type: int) -> Tensor:
    """``y2``: all rows of this rank's experts, of full width."""
    by_rank = all_to_all(unflatten(x, 0, (size_of(ep), weight.shape[0])), ep)
    gathered = all_gather(by_rank, tp)  # [tp, ep, experts, rows, columns]
    order, joined = ((2, 1, 3, 0, 4), 3) if shard_type == 0 else ((2, 1, 0, 3, 4), 2)
    return gathered.permute(order).flatten(joined, joined + 1).flatten(1, 2).contiguous()


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, ep: str, tp: str, shard_type: int, act: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Reference: ``(y1, y2, y3)``; ``y3`` is empty without an activation."""
    y2 = _gathered_rows(x, weight, ep, tp, shard_type)
    y3 = wide_product(y2, weight)
    y3 = y3 if bias is None else y3 + wide(bias)
    if act == "none":
        return y3.to(x.dtype, copy=True), y2, x.new_empty(0)
    return activate(y3, act).to(x.dtype), y2, y3.to(x.dtype)


def _shapes(
    x: Tensor, weight: Tensor, bias: Tensor | None, ep: str, tp: str, shard_type: int, act: str
) -> tuple[Tensor, Tensor, Tensor]:
    experts, width, columns = weight.shape
    rows = size_of(ep) * x.shape[1] * (size_of(tp) if shard_type == 1 else 1)
    y1 = x.new_empty((experts, rows, columns))
    return y1, x.new_empty((experts, rows, width)), x.new_empty(0) if act == "none" else x.new_empty(y1.shape)


def _operations(x: Tensor, weight: Tensor, bias: Tensor | None, ep: str, tp: str, shard_type: int, act: str) -> int:
    rows = size_of(ep) * x.shape[1] * (size_of(tp) if shard_type == 1 else 1)
    return 2 * rows * weight.numel()


npu_alltoall_allgather_bmm = npu_all_to_all_all_gather_bmm
"""MindSpeed's name of the function."""


define(
    "npu_all_to_all_all_gather_bmm(Tensor x, Tensor weight, Tensor? bias, str ep, str tp, int shard_type, str act) "
    "-> (Tensor, Tensor, Tensor)",
    _forward,
    _shapes,
    gradient=no_gradient("npu_all_to_all_all_gather_bmm"),
    operations=_operations,
)
