"""Matrix products fused with the collectives of tensor parallelism.

``from mindspeed.ops import lcal_coc``, then ``lcal_coc.matmul_all_reduce(x1, x2, None, group)`` and so on. An ``output`` that
the caller allocated is written, which is a copy, and returned. A bias [1, N] is added after the communication. Products and
sums over ranks are computed in fp32 (fp64 for fp64), rounded once. Forward only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed.ops.autocast import in_type_of
from mindspeed.ops.errors import require
from mindspeed.ops.npu_gmm import npu_gmm
from mindspeed.ops.npu_matmul_add_fp32 import is_summed_wide, wide_product
from mindspeed.ops.numerics import rounded, unflatten, wide
from mindspeed.ops.process_groups import Group, all_gather, all_reduce, name_of, reduce_scatter, size_of
from mindspeed.ops.registration import define, product_operations, require_no_gradient


@in_type_of("output", "x1", "x2", "bias")
def pure_matmul(x1: Tensor, x2: Tensor, output: Tensor | None = None, *, bias: Tensor | None = None) -> Tensor:
    """``output = x1 x2 + bias``: [m, k] by [k, n]."""
    return _run("pure_matmul", (x1, x2), bias, [], [(output, x1.shape[0])])[0]


@in_type_of("output", "x1", "x2", "bias")
def matmul_all_reduce(x1: Tensor, x2: Tensor, output: Tensor | None, group: Group, *, bias: Tensor | None = None) -> Tensor:
    """``output = sum over ranks of x1 x2, + bias``: [m, k] by [k, n] to [m, n] on every rank."""
    return _run("matmul_all_reduce", (x1, x2), bias, [group], [(output, x1.shape[0])])[0]


@in_type_of("output", "x1", "x2", "bias")
def all_gather_matmul(x1: Tensor, x2: Tensor, output: Tensor | None, group: Group, *, bias: Tensor | None = None) -> Tensor:
    """``output = (x1 of all ranks) x2 + bias``: [m / ranks, k] by [k, n] to [m, n]."""
    return _run("all_gather_matmul", (x1, x2), bias, [group], [(output, x1.shape[0] * size_of(group))])[0]


@in_type_of("output", "x1", "x2", "bias")
def all_gather_matmul_v2(
    x1: Tensor,
    x2: Tensor,
    output: Tensor | None,
    comm_output: Tensor | None,
    group: Group,
    *,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`all_gather_matmul` that also gives the gathered ``x1`` [m, k], in ``comm_output`` if that is given."""
    rows = x1.shape[0] * size_of(group)
    fits = comm_output is None or (comm_output.shape == (rows, *x1.shape[1:]) and comm_output.dtype == x1.dtype)
    require(fits, "lcal_coc.all_gather_matmul_v2", f"comm_output must be {x1.dtype} of shape {(rows, *x1.shape[1:])}")
    product, gathered = _run("all_gather_matmul_v2", (x1, x2), bias, [group], [(output, rows), (comm_output, rows)])
    return product, gathered


@in_type_of("output", "x1", "x2", "bias")
def matmul_reduce_scatter(x1: Tensor, x2: Tensor, output: Tensor | None, group: Group, *, bias: Tensor | None = None) -> Tensor:
    """This rank's rows of the sum over ranks of ``x1 x2``, plus bias: [m, k] by [k, n] to [m / ranks, n]."""
    ranks = size_of(group)
    divides = x1.shape[0] % ranks == 0
    require(divides, "lcal_coc.matmul_reduce_scatter", f"the {x1.shape[0]} rows of x1 are not divisible by {ranks} ranks")
    return _run("matmul_reduce_scatter", (x1, x2), bias, [group], [(output, x1.shape[0] // ranks)])[0]


@in_type_of("output", "x1", "x2", "bias")
def all_gather_matmul_reduce_scatter(
    x1: Tensor,
    x2: Tensor,
    output: Tensor | None,
    gather_group: Group,
    scatter_group: Group,
    *,
    bias: Tensor | None = None,
) -> Tensor:
    """Two-dimensional tensor parallelism: x1 gathered over one group, the product's rows summed and scattered over the other.

    ``x1`` is [m / gathering ranks, k], ``output`` [m / scattering ranks, n].
    """
    rows, ranks = x1.shape[0] * size_of(gather_group), size_of(scatter_group)
    divides = rows % ranks == 0
    require(divides, "lcal_coc.all_gather_matmul_reduce_scatter", f"the {rows} rows of x1 are not divisible by {ranks} ranks")
    groups = [gather_group, scatter_group]
    return _run("all_gather_matmul_reduce_scatter", (x1, x2), bias, groups, [(output, rows // ranks)])[0]


def _run(
    name: str,
    operands: tuple[Tensor, Tensor],
    bias: Tensor | None,
    groups: list[Group],
    outputs: Sequence[tuple[Tensor | None, int]],
) -> list[Tensor]:
    """Give the results, in the outputs that the caller allocated; the first one has so many rows."""
    op, (x1, x2), (output, rows) = f"lcal_coc.{name}", operands, outputs[0]
    tensors = [x1, x2] if output is None else [x1, x2, output]
    fits = all(t.dim() == 2 and t.dtype == x1.dtype for t in tensors) and x1.is_floating_point() and x1.shape[1] == x2.shape[0]
    shapes = f"x1, x2 and output have shapes {[tuple(t.shape) for t in tensors]} and types {[t.dtype for t in tensors]}"
    right = output is None or tuple(output.shape) == (rows, x2.shape[1])
    require(fits and right, op, f"{shapes}, but output must be [{rows}, n] of a product")
    flat = bias is None or tuple(bias.shape) in ((1, x2.shape[1]), (x2.shape[1],))
    require(flat, op, f"bias must have shape {(1, x2.shape[1])}")
    require_no_gradient(op, *tensors, bias)
    names = [name_of(op, group) for group in groups]
    found = getattr(torch.ops.mindspeed, f"lcal_coc_{name}")(x1, x2, bias, names)
    results = [found] if isinstance(found, Tensor) else list(found)
    return [result if given is None else given.copy_(result) for result, (given, _) in zip(results, outputs, strict=True)]


def with_bias(product: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Add a bias in a wide type and round once."""
    return rounded(product if bias is None else wide(product) + wide(bias), dtype)


def _gathered(x1: Tensor, group: str) -> Tensor:
    return all_gather(x1, group).flatten(0, 1)


def _scattered(product: Tensor, group: str) -> Tensor:
    return reduce_scatter(unflatten(product, 0, (size_of(group), -1)), group)


def _reference(gathers: bool, collect: Callable[[Tensor, str], Tensor] | None, gives: bool = False) -> Callable[..., Any]:
    """Make the reference of a product: ``x1`` may be gathered before it and given too, and partial sums collected behind it."""

    def product(x1: Tensor, x2: Tensor, bias: Tensor | None, groups: list[str]) -> Any:
        rows = _gathered(x1, groups[0]) if gathers else x1
        if collect is None and is_summed_wide(rows):  # rounded by the product itself
            y = npu_gmm(rows, x2[None], bias=None if bias is None else bias.view(1, -1), group_list=[len(rows)])
        else:
            y = wide_product(rows, x2)
            y = with_bias(y if collect is None else collect(y, groups[-1]), bias, x1.dtype)
        return (y, rows) if gives else y

    return product


def _shapes(gathers: bool, scatters: bool, gives: bool = False) -> Callable[..., Any]:
    """Make the shape kernel of a product."""

    def shapes(x1: Tensor, x2: Tensor, bias: Tensor | None, groups: list[str]) -> Any:
        rows = x1.shape[0] * (size_of(groups[0]) if gathers else 1)
        y = x1.new_empty((rows // (size_of(groups[-1]) if scatters else 1), x2.shape[1]))
        return (y, x1.new_empty((rows, x1.shape[1]))) if gives else y

    return shapes


def _gathered_operations(x1: Tensor, x2: Tensor, bias: Tensor | None, groups: list[str]) -> int:
    """Count a product of the rows of ``x1`` on all ranks of the first group."""
    return size_of(groups[0]) * product_operations(x1, x2)


for _name, _gathers, _collect, _gives in (
    ("pure_matmul", False, None, False),
    ("matmul_all_reduce", False, all_reduce, False),
    ("all_gather_matmul", True, None, False),
    ("all_gather_matmul_v2", True, None, True),
    ("matmul_reduce_scatter", False, _scattered, False),
    ("all_gather_matmul_reduce_scatter", True, _scattered, False),
):
    define(
        f"lcal_coc_{_name}(Tensor x1, Tensor x2, Tensor? bias, str[] groups) -> {'(Tensor, Tensor)' if _gives else 'Tensor'}",
        _reference(_gathers, _collect, _gives),
        _shapes(_gathers, _collect is _scattered, _gives),
        operations=_gathered_operations if _gathers else product_operations,
    )
