"""Matrix products fused with the collectives of tensor parallelism, into outputs that the caller allocated.

``from mindspeed.ops import lcal_coc``, then ``lcal_coc.matmul_all_reduce(x1, x2, output, group)`` and so on. A bias [1, N]
is added after the communication. Products and sums over ranks are computed in fp32 (fp64 for fp64), rounded once. Forward only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mindspeed.ops.autocast import in_type_of
from mindspeed.ops.errors import require
from mindspeed.ops.numerics import unflatten, wide
from mindspeed.ops.process_groups import Group, all_gather, all_reduce, name_of, reduce_scatter, size_of
from mindspeed.ops.registration import define, like, product_operations, require_no_gradient


@in_type_of("output", "x1", "x2", "bias")
def pure_matmul(x1: Tensor, x2: Tensor, output: Tensor, *, bias: Tensor | None = None) -> None:
    """``output = x1 x2 + bias``: [m, k] by [k, n]."""
    _run("pure_matmul", (x1, x2, output), bias, [], x1.shape[0])


@in_type_of("output", "x1", "x2", "bias")
def matmul_all_reduce(x1: Tensor, x2: Tensor, output: Tensor, group: Group, *, bias: Tensor | None = None) -> None:
    """``output = sum over ranks of x1 x2, + bias``: [m, k] by [k, n] to [m, n] on every rank."""
    _run("matmul_all_reduce", (x1, x2, output), bias, [group], x1.shape[0])


@in_type_of("output", "x1", "x2", "bias")
def all_gather_matmul(x1: Tensor, x2: Tensor, output: Tensor, group: Group, *, bias: Tensor | None = None) -> None:
    """``output = (x1 of all ranks) x2 + bias``: [m / ranks, k] by [k, n] to [m, n]."""
    _run("all_gather_matmul", (x1, x2, output), bias, [group], x1.shape[0] * size_of(group))


@in_type_of("output", "x1", "x2", "bias")
def all_gather_matmul_v2(
    x1: Tensor, x2: Tensor, output: Tensor, comm_output: Tensor, group: Group, *, bias: Tensor | None = None
) -> None:
    """`all_gather_matmul` that also writes the gathered ``x1`` [m, k] to ``comm_output``."""
    rows = x1.shape[0] * size_of(group)
    fits = comm_output.shape == (rows, *x1.shape[1:]) and comm_output.dtype == x1.dtype
    require(fits, "lcal_coc.all_gather_matmul_v2", f"comm_output must be {x1.dtype} of shape {(rows, *x1.shape[1:])}")
    _run("all_gather_matmul_v2", (x1, x2, output), bias, [group], rows, comm_output)


@in_type_of("output", "x1", "x2", "bias")
def matmul_reduce_scatter(x1: Tensor, x2: Tensor, output: Tensor, group: Group, *, bias: Tensor | None = None) -> None:
    """This rank's rows of the sum over ranks of ``x1 x2``, plus bias: [m, k] by [k, n] to [m / ranks, n]."""
    ranks = size_of(group)
    divides = x1.shape[0] % ranks == 0
    require(divides, "lcal_coc.matmul_reduce_scatter", f"the {x1.shape[0]} rows of x1 are not divisible by {ranks} ranks")
    _run("matmul_reduce_scatter", (x1, x2, output), bias, [group], x1.shape[0] // ranks)


@in_type_of("output", "x1", "x2", "bias")
def all_gather_matmul_reduce_scatter(
    x1: Tensor, x2: Tensor, output: Tensor, gather_group: Group, scatter_group: Group, *, bias: Tensor | None = None
) -> None:
    """Two-dimensional tensor parallelism: x1 gathered over one group, the product's rows summed and scattered over the other.

    ``x1`` is [m / gathering ranks, k], ``output`` [m / scattering ranks, n].
    """
    rows, ranks = x1.shape[0] * size_of(gather_group), size_of(scatter_group)
    divides = rows % ranks == 0
    require(divides, "lcal_coc.all_gather_matmul_reduce_scatter", f"the {rows} rows of x1 are not divisible by {ranks} ranks")
    groups = [gather_group, scatter_group]
    _run("all_gather_matmul_reduce_scatter", (x1, x2, output), bias, groups, rows // ranks)


def _run(
    name: str, tensors: tuple[Tensor, ...], bias: Tensor | None, groups: list[Group], rows: int, *gathered: Tensor
) -> None:
    op, (x1, x2, output) = f"lcal_coc.{name}", tensors
    fits = all(t.dim() == 2 and t.dtype == x1.dtype for t in tensors) and x1.is_floating_point() and x1.shape[1] == x2.shape[0]
    shapes = f"x1, x2 and output have shapes {[tuple(t.shape) for t in tensors]} and types {[t.dtype for t in tensors]}"
    require(fits and tuple(output.shape) == (rows, x2.shape[1]), op, f"{shapes}, but output must be [{rows}, n] of a product")
    flat = bias is None or tuple(bias.shape) in ((1, x2.shape[1]), (x2.shape[1],))
    require(flat, op, f"bias must have shape {(1, x2.shape[1])}")
    require_no_gradient(op, *tensors, bias)
    names = [name_of(op, group) for group in groups]
    getattr(torch.ops.mindspeed, f"lcal_coc_{name}")(x1, x2, bias, names, output, *gathered)


def _finish(product: Tensor, bias: Tensor | None, output: Tensor) -> None:
    output.copy_(product if bias is None else product + wide(bias))


def _gathered(x1: Tensor, group: str) -> Tensor:
    return all_gather(x1, group).flatten(0, 1)


def _scattered(product: Tensor, group: str) -> Tensor:
    return reduce_scatter(unflatten(product, 0, (size_of(group), -1)), group)


def _reference(gathers: bool, collect: Callable[[Tensor, str], Tensor] | None) -> Callable[..., None]:
    """Make the reference of a product: ``x1`` may be gathered before it, and partial sums collected behind it."""

    def product(x1: Tensor, x2: Tensor, bias: Tensor | None, groups: list[str], output: Tensor, *gathered: Tensor) -> None:
        x1 = _gathered(x1, groups[0]) if gathers else x1
        for target in gathered:
            target.copy_(x1)
        y = wide(x1) @ wide(x2)
        _finish(y if collect is None else collect(y, groups[-1]), bias, output)

    return product


def _gathered_operations(x1: Tensor, x2: Tensor, bias: Tensor | None, groups: list[str], *outputs: Tensor) -> int:
    """Count a product of the rows of ``x1`` on all ranks of the first group."""
    return size_of(groups[0]) * product_operations(x1, x2)


_OPERANDS = "Tensor x1, Tensor x2, Tensor? bias, str[] groups, Tensor(a!) output"

for _name, _gathers, _collect in (
    (f"lcal_coc_pure_matmul({_OPERANDS})", False, None),
    (f"lcal_coc_matmul_all_reduce({_OPERANDS})", False, all_reduce),
    (f"lcal_coc_all_gather_matmul({_OPERANDS})", True, None),
    (f"lcal_coc_all_gather_matmul_v2({_OPERANDS}, Tensor(b!) gathered)", True, None),
    (f"lcal_coc_matmul_reduce_scatter({_OPERANDS})", False, _scattered),
    (f"lcal_coc_all_gather_matmul_reduce_scatter({_OPERANDS})", True, _scattered),
):
    _count = _gathered_operations if _gathers else product_operations
    define(f"{_name} -> ()", _reference(_gathers, _collect), like(), operations=_count)
