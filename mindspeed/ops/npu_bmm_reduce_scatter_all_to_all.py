"""The second product of experts and the way back: product, reduce-scatter over tensor ranks, all-to-all over expert ranks.

The bias is added after the reduce-scatter. Product, sum over ranks and bias are computed in fp32 (fp64 for fp64 input) and
rounded once, before the all-to-all. Forward only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed.ops.autocast import in_autocast_type
from mindspeed.ops.errors import require
from mindspeed.ops.npu_all_to_all_all_gather_bmm import bias_by_expert, check_operands
from mindspeed.ops.npu_matmul_add_fp32 import wide_product
from mindspeed.ops.numerics import unflatten, wide
from mindspeed.ops.process_groups import Group, all_to_all, name_of_size, reduce_scatter, size_of
from mindspeed.ops.registration import define, no_gradient, product_operations


@in_autocast_type("x", "weight", "bias")
def npu_bmm_reduce_scatter_all_to_all(
    x: Tensor,
    weight: Tensor,
    group_ep: Group,
    group_ep_worldsize: int,
    group_tp: Group,
    group_tp_worldsize: int,
    *,
    bias: Tensor | None = None,
    shard_type: int = 0,
) -> Tensor:
    """Give [E, C, H / tp] (``shard_type`` 0) or [E, C / tp, H] (1).

    ``x`` is [E / ep, ep C, M / tp], ``weight`` [E / ep, M / tp, H], ``bias`` [E / ep, H / tp] for shard_type 0,
    [E / ep, H] for 1, or with a 1 in the middle. Raises OperatorError for others.
    """
    op, ranks = "npu_bmm_reduce_scatter_all_to_all", group_ep_worldsize * group_tp_worldsize
    ep, tp = name_of_size(op, group_ep, group_ep_worldsize), name_of_size(op, group_tp, group_tp_worldsize)
    check_operands(op, x, weight, shard_type)
    fits = x.dim() == weight.dim() == 3 and x.shape[0] == weight.shape[0] and x.shape[2] == weight.shape[1]
    shapes = f"x of shape {tuple(x.shape)} and weight of shape {tuple(weight.shape)}"
    require(fits, op, f"{shapes} cannot be multiplied")
    experts, rows, width = x.shape[0], x.shape[1], weight.shape[2]
    whole = rows % ranks == 0 if shard_type == 1 else rows % group_ep_worldsize == width % group_tp_worldsize == 0
    require(whole, op, f"{shapes} cannot be split for {group_ep_worldsize} expert and {group_tp_worldsize} tensor ranks")
    columns = width if shard_type == 1 else width // group_tp_worldsize
    flat = bias_by_expert(op, bias, experts, columns)
    y: Tensor = torch.ops.mindspeed.npu_bmm_reduce_scatter_all_to_all(x, weight, flat, ep, tp, shard_type)
    return y


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, ep: str, tp: str, shard_type: int) -> Tensor:
    return _scattered_rows(wide_product(x, weight), bias, x.dtype, ep, tp, shard_type)


def _scattered_rows(product: Tensor, bias: Tensor | None, dtype: torch.dtype, ep: str, tp: str, shard_type: int) -> Tensor:
    """This rank's share of the sum over tensor ranks of the products, plus bias, sent back in the type ``dtype``."""
    experts, rows, _ = product.shape
    expert_ranks, tensor_ranks = size_of(ep), size_of(tp)
    product = product.view(experts, expert_ranks, rows // expert_ranks, -1)
    if shard_type == 0:
        parts = unflatten(product, 3, (tensor_ranks, -1)).permute(3, 0, 1, 2, 4)
    else:
        parts = unflatten(product, 2, (tensor_ranks, -1)).permute(2, 0, 1, 3, 4)
    mine = reduce_scatter(parts, tp)  # [experts, ep, rows, columns]
    mine = mine if bias is None else mine + wide(bias)[:, :, None]
    return all_to_all(mine.to(dtype).transpose(0, 1), ep).flatten(0, 1)


def _shape(x: Tensor, weight: Tensor, bias: Tensor | None, ep: str, tp: str, shard_type: int) -> Tensor:
    expert_ranks, tensor_ranks = size_of(ep), size_of(tp)
    rows, columns = x.shape[1] // expert_ranks, weight.shape[2]
    rows, columns = (rows // tensor_ranks, columns) if shard_type == 1 else (rows, columns // tensor_ranks)
    return x.new_empty((x.shape[0] * expert_ranks, rows, columns))


npu_bmm_reducescatter_alltoall = npu_bmm_reduce_scatter_all_to_all
"""MindSpeed's name of the function."""


define(
    "npu_bmm_reduce_scatter_all_to_all(Tensor x, Tensor weight, Tensor? bias, str ep, str tp, int shard_type) -> Tensor",
    _forward,
    _shape,
    gradient=no_gradient("npu_bmm_reduce_scatter_all_to_all"),
    operations=product_operations,
)
