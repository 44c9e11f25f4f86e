"""Two-dimensional tensor parallelism: products of weights that are split along both dimensions.

A tensor-parallel group of t = x * y ranks is x rows of y neighbours: rank i * y + j is (i, j). Its Y group are the ranks
(i, *), its X group the ranks (*, j). Activations are those of sequence parallelism: R rows of hidden states on a rank, or
features of all T = R * t rows. In between stands what a product reads and writes:

    hidden   [R, H]   <- all-to-all over Y, all-gather over X ->        [T, H / y]   hidden features j of all rows
    features [T, F]   <- all-gather over Y ->                           [T, F * y]   features of the ranks (i, *)

Read from right to left these are the sums: reduce-scatter for all-gather. Parts have equally many rows of every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed.features.tensor_parallel_2d.costs import GROUPS
from mindspeed.tensor_parallel.linear import WeightGradient
from mindspeed.tensor_parallel.pipeline import run_in_parts

Sent: TypeAlias = tuple[Tensor, Any]
"""A tensor that a collective fills, and the handle of the collective; None where there is nothing to wait for."""
Step: TypeAlias = Callable[[Sent], Sent]
"""Waits for what was sent, and begins the next collective."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The process groups of this rank."""

    x_group: dist.ProcessGroup
    y_group: dist.ProcessGroup

    @property
    def x(self) -> int:
        return self.x_group.size()

    @property
    def y(self) -> int:
        return self.y_group.size()

    @property
    def ranks(self) -> int:
        return self.x * self.y


@dataclass(frozen=True, slots=True)
class Overlap:
    """The collectives that travel in parts behind products: what forward gathers, what it sums, and both of backward."""

    gather: bool = False
    scatter: bool = False
    backward: bool = False


class Side(Protocol):
    """Hold one of the two forms of an activation, and the way from there to a product and back."""

    def rows(self, x: Tensor) -> int:
        """The rows of this rank in an activation."""

    def empty(self, like: Tensor, rows: int, features: int) -> Tensor:
        """An activation for a product with so many features."""

    def part(self, x: Tensor, number: int, parts: int) -> Tensor:
        """A view of a part of an activation."""

    @property
    def is_gathered(self) -> bool:
        """Return whether a product reads more of an activation than this rank has."""

    @property
    def gathering(self) -> list[Step]: ...

    def gathered(self, sent: Sent) -> Tensor:
        """Wait for the last step of gathering: [t, rows of a part, features of the product]."""

    def product(self, x: Tensor, w: Tensor) -> Tensor:
        """Multiply [t, rows, K] by [K, N] into the buffer that is summed, whose last dimensions are rows and features."""

    @property
    def scattering(self) -> list[Step]: ...

    def scattered(self, sent: Sent) -> Tensor:
        """Wait for the last step of scattering: a part of the activation."""


def _arrived(sent: Sent) -> Tensor:
    tensor, work = sent
    if work is not None:
        work.wait()
    return tensor


def _all_gather(x: Tensor, group: dist.ProcessGroup) -> Sent:
    """Gather as [ranks, ...]."""
    if group.size() == 1:
        return x.unsqueeze(0), None
    gathered = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    work = dist.all_gather_into_tensor(gathered, x.contiguous(), group=group, async_op=True)
    return gathered.view(group.size(), *x.shape), work


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Sent:
    """Sum ``x`` [ranks, ...] over the ranks and keep this rank's part."""
    if group.size() == 1:
        return x[0], None
    part = x.new_empty(x.shape[1:])
    return part, dist.reduce_scatter_tensor(part, x.flatten(0, 1), group=group, async_op=True)


def _all_to_all(x: Tensor, group: dist.ProcessGroup) -> Sent:
    """Exchange ``x`` [ranks, ...]: in the place of what went to a rank comes what that rank sent."""
    if group.size() == 1:
        return x, None
    x = x.contiguous()
    arrived = torch.empty_like(x)
    return arrived, dist.all_to_all_single(arrived, x, group=group, async_op=True)


@dataclass(frozen=True, slots=True)
class Hidden:
    """Hidden states [R, H] of this rank's rows; the product has features H / y of all rows."""

    grid: Grid

    def rows(self, x: Tensor) -> int:
        return x.shape[0]

    def empty(self, like: Tensor, rows: int, features: int) -> Tensor:
        return like.new_empty(rows, features * self.grid.y)

    def part(self, x: Tensor, number: int, parts: int) -> Tensor:
        return x.view(parts, -1, x.shape[-1])[number]

    @property
    def is_gathered(self) -> bool:
        return True

    @property
    def gathering(self) -> list[Step]:
        steps: list[Step] = [self._split_hidden] if self.grid.y > 1 else []
        return [*steps, self._gather_rows] if self.grid.x > 1 else steps

    def _split_hidden(self, sent: Sent) -> Sent:
        x_rH, y = _arrived(sent), self.grid.y
        return _all_to_all(x_rH.view(-1, y, x_rH.shape[-1] // y).transpose(0, 1), self.grid.y_group)

    def _gather_rows(self, sent: Sent) -> Sent:
        return _all_gather(_arrived(sent), self.grid.x_group)

    def gathered(self, sent: Sent) -> Tensor:
        x = _arrived(sent)
        return x.view(self.grid.ranks, -1, x.shape[-1])

    def product(self, x: Tensor, w: Tensor) -> Tensor:
        return x.flatten(0, 1).matmul(w).view(self.grid.x, self.grid.y, x.shape[1], -1)

    @property
    def scattering(self) -> list[Step]:
        steps: list[Step] = [self._sum_rows] if self.grid.x > 1 else []
        return [*steps, self._join_hidden] if self.grid.y > 1 else steps

    def _sum_rows(self, sent: Sent) -> Sent:
        return _reduce_scatter(_arrived(sent), self.grid.x_group)

    def _join_hidden(self, sent: Sent) -> Sent:
        x = _arrived(sent)
        return _all_to_all(x.view(self.grid.y, -1, x.shape[-1]), self.grid.y_group)

    def scattered(self, sent: Sent) -> Tensor:
        x = _arrived(sent)
        return x.view(self.grid.y, -1, x.shape[-1]).transpose(0, 1).flatten(1)


@dataclass(frozen=True, slots=True)
class Features:
    """Features [T, F] of all rows on this rank; the product has those of the ranks of its Y group, F * y."""

    grid: Grid

    def rows(self, x: Tensor) -> int:
        return x.shape[0] // self.grid.ranks

    def empty(self, like: Tensor, rows: int, features: int) -> Tensor:
        return like.new_empty(rows * self.grid.ranks, features // self.grid.y)

    def part(self, x: Tensor, number: int, parts: int) -> Tensor:
        return x.view(self.grid.ranks, parts, -1, x.shape[-1])[:, number]

    @property
    def is_gathered(self) -> bool:
        return self.grid.y > 1

    @property
    def gathering(self) -> list[Step]:
        return [self._gather_features]

    def _gather_features(self, sent: Sent) -> Sent:
        return _all_gather(_arrived(sent), self.grid.y_group)

    def gathered(self, sent: Sent) -> Tensor:
        return _arrived(sent).permute(1, 2, 0, 3).flatten(2)

    def product(self, x: Tensor, w: Tensor) -> Tensor:
        y, rows = self.grid.y, x.flatten(0, 1)
        blocks = x.new_empty(y, rows.shape[0], w.shape[1] // y)
        for block, w_block in zip(blocks, w.chunk(y, dim=1), strict=True):
            torch.mm(rows, w_block, out=block)
        return blocks.view(y, *x.shape[:2], -1)

    @property
    def scattering(self) -> list[Step]:
        return [self._sum_features]

    def _sum_features(self, sent: Sent) -> Sent:
        return _reduce_scatter(_arrived(sent), self.grid.y_group)

    def scattered(self, sent: Sent) -> Tensor:
        return _arrived(sent)


def _chain(steps: list[Step], sent: Sent) -> Sent:
    for step in steps:
        sent = step(sent)
    return sent


def gather(side: Side, x: Tensor) -> Tensor:
    """Gather a whole activation as a product reads it: [t, R, K]."""
    return side.gathered(_chain(side.gathering, (side.part(x, 0, 1), None)))


class GatherBeside:
    """Gathers an activation chunk by chunk, overlapped with other work."""

    def __init__(self, side: Side, x: Tensor, parts: int) -> None:
        self._side, self._x, self._parts = side, x, parts
        self._sent: list[Sent] = []

    def advance(self, part: int) -> None:
        """Begin to gather a part, and the second step of the part before it."""
        self._finish_steps()
        self._sent.append(self._side.gathering[0]((self._side.part(self._x, part, self._parts), None)))

    def rows(self) -> Tensor:
        """Wait for all parts: [T, K]."""
        self._finish_steps()
        return _joined([self._side.gathered(sent) for sent in self._sent])

    def _finish_steps(self) -> None:
        if self._sent:
            self._sent[-1] = _chain(self._side.gathering[1:], self._sent[-1])


@dataclass(frozen=True, slots=True)
class ActivationTransfer:
    """A product from one form of activations to the other.

    ``gathers`` and ``scatters`` let the parts of what is gathered, and of what is summed, travel beside the products of others.
    """

    source: Side
    target: Side
    gathers: bool
    scatters: bool

    def multiply(
        self,
        x: Tensor,
        w_KN: Tensor,
        parts: int,
        beside: Callable[[int], None] | None = None,
        behind: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """Return the product of ``x`` as an activation.

        ``beside`` is called with the number of each part before its product, and ``behind`` with the gathered ``x`` [T, K]
        while the last sums travel.
        """
        whole = None if self.gathers else gather(self.source, x)
        arrived: list[Tensor] = []
        products: list[Sent] = []

        def multiply_part(part: int, sent: Any) -> Sent:
            rows = self.source.gathered(sent) if whole is None else _part_of(whole, part, parts)
            if behind:
                arrived.append(rows)
            if beside:
                beside(part)
            product = self.target.product(rows, w_KN), None
            return self.target.scattering[0](product) if self.scatters else product

        def collect(part: int, sent: Sent) -> None:
            products.append(sent)

        first, *others = self.source.gathering
        before = [lambda part, _: first((self.source.part(x, part, parts), None)), *map(_stage, others)] if self.gathers else []
        after = [*map(_stage, self.target.scattering[1:])] if self.scatters else []
        run_in_parts(parts, *before, multiply_part, *after, collect)
        if behind:
            behind(_joined(arrived))
        if self.scatters:
            y = self.target.empty(x, self.source.rows(x), w_KN.shape[1])
            for part, sent in enumerate(products):
                self.target.part(y, part, parts).copy_(self.target.scattered(sent))
            return y
        product = products[0][0] if parts == 1 else torch.cat([product for product, _ in products], dim=-2)
        y = self.target.scattered(_chain(self.target.scattering, (product, None)))
        return y.reshape(-1, y.shape[-1])


def _part_of(x_tRK: Tensor, part: int, parts: int) -> Tensor:
    return x_tRK.view(x_tRK.shape[0], parts, -1, x_tRK.shape[2])[:, part]


def _joined(parts: list[Tensor]) -> Tensor:
    """Put parts [t, rows, K] back in the order of the ranks: [T, K]."""
    rows = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return rows.reshape(-1, rows.shape[-1])


def _stage(step: Step) -> Callable[[int, Any], Any]:
    return lambda part, sent: step(sent)


@dataclass(frozen=True, slots=True)
class Products2D:
    """The product of a linear layer in both directions, from one form of activations to the other.

    ``parts`` gives the number of parts for a number of rows of this rank.
    """

    source: Side
    target: Side
    overlap: Overlap
    parts: Callable[[int], int]

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        transfer = ActivationTransfer(self.source, self.target, self.overlap.gather, self.overlap.scatter)
        in_parts = self.overlap.gather or self.overlap.scatter
        return transfer.multiply(x, weight.t(), self.parts(self.source.rows(x)) if in_parts else 1)

    def input_gradient(self, g: Tensor, weight: Tensor) -> Tensor:
        in_parts = self.overlap.backward
        transfer = ActivationTransfer(self.target, self.source, in_parts, in_parts)
        return transfer.multiply(g, weight, self.parts(self.target.rows(g)) if in_parts else 1)

    def gradients(self, g: Tensor, x: Tensor, weight: Tensor, weight_gradient: WeightGradient) -> tuple[Tensor, Tensor | None]:
        """Gather the input again behind the input gradient's product, and sum that behind the weight gradient's.

        In parts the gradient is gathered behind its product too, where it is gathered at all.
        """
        if self.overlap.backward and self.target.is_gathered:
            return self._gradients_in_parts(g, x, weight, weight_gradient)
        begin, *others = self.source.gathering
        again = begin((self.source.part(x, 0, 1), None))
        g_rows = gather(self.target, g)
        again = _chain(others, again)
        first, *rest = self.source.scattering
        sent = first((self.source.product(g_rows, weight), None))
        grad_weight = weight_gradient(g_rows.flatten(0, 1), self.source.gathered(again).flatten(0, 1))
        return self.source.scattered(_chain(rest, sent)).reshape(x.shape), grad_weight

    def _gradients_in_parts(
        self, g: Tensor, x: Tensor, weight: Tensor, weight_gradient: WeightGradient
    ) -> tuple[Tensor, Tensor | None]:
        parts = self.parts(self.target.rows(g))
        again = GatherBeside(self.source, x, parts)
        grad_weight: list[Tensor | None] = []

        def make(g_rows: Tensor) -> None:
            grad_weight.append(weight_gradient(g_rows, again.rows()))

        grad_input = ActivationTransfer(self.target, self.source, True, True).multiply(g, weight, parts, again.advance, make)
        return grad_input, grad_weight[0]


def column_products(grid: Grid, overlap: Overlap, parts: Callable[[int], int]) -> Products2D:
    """From hidden states to features; weight [N / x, H / y]."""
    return Products2D(Hidden(grid), Features(grid), overlap, parts)


def row_products(grid: Grid, overlap: Overlap, parts: Callable[[int], int]) -> Products2D:
    """From features to hidden states; weight [H / y, N / x]."""
    return Products2D(Features(grid), Hidden(grid), overlap, parts)


def make_grid(tp_group: dist.ProcessGroup, y: int) -> Grid:
    """Split a tensor-parallel group into rows of ``y`` neighbours; every rank of it calls this."""
    ranks, mine = dist.get_process_group_ranks(tp_group), tp_group.rank()
    first = mine // y * y
    parts = dict(zip(GROUPS, (ranks[mine % y :: y], ranks[first : first + y]), strict=True))
    return Grid(*(dist.new_group(part, use_local_synchronization=True, group_desc=name) for name, part in parts.items()))


def destroy_grid(grid: Grid) -> None:
    """Destroy both groups, before Megatron destroys its groups."""
    dist.destroy_process_group(grid.x_group)
    dist.destroy_process_group(grid.y_group)
