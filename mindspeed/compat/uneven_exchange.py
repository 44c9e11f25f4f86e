"""Exchange and gather tensors whose sizes the ranks do not divide, by MindSpeed's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

Change = Callable[[Tensor], Tensor]
Scale = Literal["up", "down"] | None
"""Multiply the gradient by the ranks, divide it by them, or leave it."""


def cal_split_sizes(dim_size: int, world_size: int) -> list[int]:
    """Return the sizes of ``world_size`` parts that differ by one at most, the larger first."""
    size, larger = divmod(dim_size, world_size)
    return [size + (rank < larger) for rank in range(world_size)]


def all_to_all(
    input_: Tensor,
    process_group: dist.ProcessGroup,
    scatter_dim: int = 2,
    gather_dim: int = 1,
    gather_size: int | None = None,
) -> Tensor:
    """Scatter one dimension over the ranks and gather another, with its gradient.

    ``gather_size`` is the whole size of the gathered dimension; without it every rank has as much of it.
    """
    ranks = process_group.size()
    if ranks == 1:
        return input_
    scattered = cal_split_sizes(input_.shape[scatter_dim], ranks)
    gathered = cal_split_sizes(gather_size, ranks) if gather_size is not None else [input_.shape[gather_dim]] * ranks
    there = partial(_exchange, group=process_group, scatter=scatter_dim, gather=gather_dim, sent=scattered, kept=gathered)
    back = partial(_exchange, group=process_group, scatter=gather_dim, gather=scatter_dim, sent=gathered, kept=scattered)
    return _with_gradient(input_, there, back)


def split_forward_gather_backward(
    input_: Tensor,
    process_group: dist.ProcessGroup,
    dim: int,
    split_sizes: Sequence[int] | None = None,
    grad_scale: Scale = "down",
) -> Tensor:
    """Keep this rank's part of a dimension; the gradients of all ranks are gathered."""
    if process_group.size() == 1:
        return input_
    sizes = list(split_sizes or cal_split_sizes(input_.shape[dim], process_group.size()))
    part = partial(_own_part, group=process_group, dim=dim, sizes=sizes)
    return _with_gradient(input_, part, partial(_gathered, group=process_group, dim=dim, sizes=sizes, scale=grad_scale))


def gather_forward_split_backward(
    input_: Tensor,
    process_group: dist.ProcessGroup,
    dim: int,
    gather_sizes: Sequence[int] | None = None,
    grad_scale: Scale = "up",
) -> Tensor:
    """Gather a dimension from all ranks; the gradient of this rank's part is kept."""
    ranks = process_group.size()
    if ranks == 1:
        return input_
    sizes = list(gather_sizes or [input_.shape[dim]] * ranks)
    part = partial(_own_part, group=process_group, dim=dim, sizes=sizes, scale=grad_scale)
    return _with_gradient(input_, partial(_gathered, group=process_group, dim=dim, sizes=sizes), part)


def _exchange(x: Tensor, group: dist.ProcessGroup, scatter: int, gather: int, sent: list[int], kept: list[int]) -> Tensor:
    """Send part r of dimension ``scatter`` to rank r; join what arrives along ``gather``, in which rank r has ``kept[r]``."""
    parts = [part.contiguous() for part in torch.split(x, sent, dim=scatter)]
    shape = list(parts[group.rank()].shape)
    received = [x.new_empty([*shape[: gather % x.dim()], size, *shape[gather % x.dim() + 1 :]]) for size in kept]
    flat = torch.cat([part.flatten() for part in received])
    dist.all_to_all_single(
        flat,
        torch.cat([part.flatten() for part in parts]),
        [part.numel() for part in received],
        [part.numel() for part in parts],
        group=group,
    )
    pieces = torch.split(flat, [part.numel() for part in received])
    return torch.cat([piece.view_as(part) for piece, part in zip(pieces, received, strict=True)], dim=gather)


def _own_part(x: Tensor, group: dist.ProcessGroup, dim: int, sizes: list[int], scale: Scale = None) -> Tensor:
    part: Tensor = torch.split(_scaled(x, group, scale), sizes, dim=dim)[group.rank()].contiguous()
    return part


def _gathered(x: Tensor, group: dist.ProcessGroup, dim: int, sizes: list[int], scale: Scale = None) -> Tensor:
    x, widest = _scaled(x, group, scale), max(sizes)
    padded = x.new_zeros([widest if place == dim % x.dim() else size for place, size in enumerate(x.shape)])
    padded.narrow(dim, 0, x.shape[dim]).copy_(x)
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim=dim)


def _scaled(gradient: Tensor, group: dist.ProcessGroup, scale: Scale) -> Tensor:
    return gradient * group.size() if scale == "up" else gradient / group.size() if scale == "down" else gradient


class _WithGradient(torch.autograd.Function):
    """Compute ``forward(x)``, whose gradient is ``backward(gradient)``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Change, backward: Change) -> Tensor:
        ctx.gradient_of = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradient_of(gradient), None, None


def _with_gradient(x: Tensor, forward: Change, backward: Change) -> Tensor:
    result: Tensor = _WithGradient.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return result
