"""Several tensor-parallel products and their sums over ranks: ``y_i = sum over ranks of x_i W_i, plus bias_i``.

Each rank adds its share of the bias, ``bias_i / ranks``. Computed and summed in fp32 (fp64 for fp64 input), rounded once.
Forward only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mindspeed.ops.autocast import in_autocast_type
from mindspeed.ops.errors import require
from mindspeed.ops.group_list import group_ranges, group_tensor
from mindspeed.ops.npu_matmul_add_fp32 import wide_product
from mindspeed.ops.numerics import wide
from mindspeed.ops.process_groups import Group, all_reduce, name_of, size_of
from mindspeed.ops.registration import define, no_gradient


@in_autocast_type("x", "weight", "bias")
def npu_grouped_mat_mul_all_reduce(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    hcomm: Group,
    *,
    bias: Sequence[Tensor] | None = None,
    group_list: Tensor | Sequence[int] | None = None,
    split_item: int = 0,
    reduce_op: str = "sum",
    comm_turn: int = 0,
) -> list[Tensor]:
    """Give the list of products ``[M_i, N_i]`` of ``x_i`` [M_i, K_i] and ``weight_i`` [K_i, N_i].

    ``split_item`` 0: a list in, a list out. 1: one x, cut after the rows that ``group_list`` (cumulative) says. 2: one result,
    of all the rows one after the other. 3: both. ``bias_i`` is [N_i]. ``comm_turn`` changes nothing.
    Raises OperatorError for others.
    """
    op = "npu_grouped_mat_mul_all_reduce"
    require(reduce_op == "sum", op, f"reduce_op is {reduce_op}, but must be sum")
    require(split_item in (0, 1, 2, 3), op, f"split_item is {split_item}, but must be 0, 1, 2 or 3")
    name, parts, weights = name_of(op, hcomm), list(x), list(weight)
    if split_item in (1, 3):
        require(len(parts) == 1, op, f"split_item {split_item} needs one x, but {len(parts)} are given")
        require(group_list is not None, op, f"split_item {split_item} needs group_list")
        ranges = group_ranges(op, group_tensor(op, [] if group_list is None else group_list), parts[0].shape[0], True)
        parts = [parts[0][start:end] for start, end in ranges]
    else:
        require(group_list is None, op, f"split_item {split_item} does not support group_list")
    counts = f"x has {len(parts)} tensors, but there are {len(weights)} weights"
    require(0 < len(parts) == len(weights), op, counts)
    require(bias is None or len(bias) == len(weights), op, f"the number of biases differs from the {len(weights)} weights")
    biases: list[Tensor | None] = [None] * len(weights) if bias is None else list(bias)
    for i, (a, b, c) in enumerate(zip(parts, weights, biases, strict=True)):
        fits = a.dim() == b.dim() == 2 and a.shape[1] == b.shape[0] and a.dtype == b.dtype and a.is_floating_point()
        text = f"x of {a.dtype} {tuple(a.shape)} and weight of {b.dtype} {tuple(b.shape)} cannot be multiplied"
        require(fits, op, f"number {i}: {text}")
        require(c is None or tuple(c.shape) == (b.shape[1],), op, f"product {i}: bias must have shape {(b.shape[1],)}")
    single = split_item in (2, 3)
    one_width = not single or len({w.shape[1] for w in weights}) == 1
    require(one_width, op, f"split_item {split_item} needs results of equal width")
    results: list[Tensor] = torch.ops.mindspeed.npu_grouped_mat_mul_all_reduce(
        parts, weights, None if bias is None else list(bias), name
    )
    return [torch.cat(results)] if single else results


def _forward(x: list[Tensor], weight: list[Tensor], bias: list[Tensor] | None, group: str) -> list[Tensor]:
    ranks, results = size_of(group), []
    for i, (part, matrix) in enumerate(zip(x, weight, strict=True)):
        product = wide_product(part, matrix)
        product = product if bias is None else product + wide(bias[i]) / ranks
        results.append(all_reduce(product, group).to(part.dtype))
    return results


def _shapes(x: list[Tensor], weight: list[Tensor], bias: list[Tensor] | None, group: str) -> list[Tensor]:
    return [part.new_empty((part.shape[0], matrix.shape[1])) for part, matrix in zip(x, weight, strict=True)]


def _operations(x: list[Tensor], weight: list[Tensor], bias: list[Tensor] | None, group: str) -> int:
    return sum(2 * part.numel() * matrix.shape[1] for part, matrix in zip(x, weight, strict=True))


define(
    "npu_grouped_mat_mul_all_reduce(Tensor[] x, Tensor[] weight, Tensor[]? bias, str group) -> Tensor[]",
    _forward,
    _shapes,
    gradient=no_gradient("npu_grouped_mat_mul_all_reduce"),
    operations=_operations,
)
