"""Linear layers of tensor parallelism: the products and collectives of `mindspeed.tensor_parallel` in torch's module."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import Self

from mindspeed.features.coc.products import GatheredProducts, Parts, ReducedProducts, ScatteredProducts
from mindspeed.features.tensor_parallel_2d.products import Grid, Overlap, column_products, row_products
from mindspeed.nn.mesh import Mesh, group_of, share_of
from mindspeed.ops.autocast import in_autocast_type
from mindspeed.ops.errors import refuse
from mindspeed.ops.process_groups import group_of_name, name_of
from mindspeed.tensor_parallel.linear import Products, linear, replicated
from mindspeed.tensor_parallel.pipeline import parts_that_fit


class _ParallelLinear(nn.Linear):
    _split: ClassVar[int]
    """The dimension of the weight that is split over the ranks: 0 output features, 1 input features."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        mesh: Mesh,
        sequence_parallel: bool = False,
        chunks: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        name = type(self).__name__
        is_grid = not isinstance(mesh, dist.ProcessGroup) and mesh.ndim == 2
        groups = mesh.get_all_groups() if is_grid else [group_of(mesh, name)]  # type: ignore[union-attr]
        if chunks < 1:
            refuse(f"{name}: chunks is {chunks}", "pass chunks=1 or more")
        if is_grid and not sequence_parallel:
            refuse(f"{name}: a mesh of two dimensions needs sequence_parallel", "pass sequence_parallel=True")
        x, y = (group.size() for group in groups) if is_grid else (groups[0].size(), 1)
        kinds = ("output features", "input features")
        sizes = [out_features, in_features]
        sizes[self._split] = share_of(sizes[self._split], x * y, name, kinds[self._split]) * y
        sizes[1 - self._split] = share_of(sizes[1 - self._split], y, name, kinds[1 - self._split])
        self.ranks, self._input_shares = x * y, in_features // sizes[1]  # before the constructor, which draws the weight
        super().__init__(sizes[1], sizes[0], bias, device, dtype)
        if bias and is_grid:
            length = out_features if self._split else out_features // self.ranks
            self.bias = nn.Parameter(self.weight.new_empty(length))
            self.reset_parameters()
        self._groups = [name_of(name, group) for group in groups]
        self.sequence_parallel, self.chunks = sequence_parallel, chunks

    @classmethod
    def from_linear(cls, whole: nn.Linear, mesh: Mesh, *, sequence_parallel: bool = False, chunks: int = 1) -> Self:
        """Return this rank's share of a layer that is equal on all ranks."""
        made = cls(
            whole.in_features,
            whole.out_features,
            whole.bias is not None,
            mesh=mesh,
            sequence_parallel=sequence_parallel,
            chunks=chunks,
            device=whole.weight.device,
            dtype=whole.weight.dtype,
        )
        block, rank, axis = whole.weight, 0, cls._split
        for group in made.groups:
            block = block.chunk(group.size(), axis)[group.rank()]
            rank, axis = rank * group.size() + group.rank(), 1 - axis
        with torch.no_grad():
            made.weight.copy_(block)
            if whole.bias is not None:
                made.bias.copy_(whole.bias if cls._split else whole.bias.chunk(made.ranks)[rank])
        return made

    def reset_parameters(self) -> None:
        """Draw the parameters as ``nn.Linear`` does for all input features."""
        super().reset_parameters()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(self._input_shares**-0.5)

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The ranks that the layer is split over; with a mesh of two dimensions those of each."""
        return [group_of_name(name) for name in self._groups]

    def _products(self, one: Callable[[dist.ProcessGroup, Parts], Products], two: Callable[..., Products]) -> Products:
        """Return the products on one group, or on the grid of two."""
        parts = partial(parts_that_fit, "coc", self.chunks)
        group, *others = self.groups
        overlap = self.chunks > 1
        return two(Grid(group, *others), Overlap(overlap, overlap, overlap), parts) if others else one(group, parts)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, ranks={self.ranks}, sequence_parallel={self.sequence_parallel}, chunks={self.chunks}"


class ColumnParallelLinear(_ParallelLinear):
    """Replaces ``torch.nn.Linear``: each rank computes an equal share of the output features (arXiv 1909.08053).

    ``mesh`` is a `DeviceMesh` of one dimension or a process group. ``weight`` is [out_features / ranks, in_features], ``bias``
    the same share. The input is [..., in_features], equal on all ranks, of the types of ``nn.Linear``, autocast included. The
    output has this rank's features.

    With ``sequence_parallel`` the input is [tokens here, ..., in_features], and the output has the tokens of all ranks.
    ``chunks`` then splits the all-gather and the product, each transfer overlapped with the product of another chunk; fewer
    where the rows are not divisible. A ``mesh`` of two dimensions, x and y, splits the weight along both, [out_features / x,
    in_features / y], with the same inputs and outputs. Let the random numbers of ranks differ when weights are drawn, or use
    `from_linear`. Raises OperatorError where the ranks do not divide the output features.
    """

    _split = 0

    def forward(self, input: Tensor) -> Tensor:
        """Multiply ``input`` by this rank's share of the weight."""
        if self.sequence_parallel:
            return _linear(input, self.weight, self.bias, self._products(GatheredProducts, column_products))
        return functional.linear(replicated(input, *self.groups), self.weight, self.bias)


class RowParallelLinear(_ParallelLinear):
    """Replaces ``torch.nn.Linear``: each rank has an equal share of the input features, and outputs are summed over ranks.

    ``mesh``, types and ``from_linear`` are those of `ColumnParallelLinear`, whose output is the input of this layer. ``weight``
    is [out_features, in_features / ranks]. ``bias`` is whole, equal on all ranks, and added once. The output is
    [..., out_features], equal on all ranks, or with ``sequence_parallel`` that of this rank's tokens, which are split in
    dimension 0. ``chunks`` overlaps the sum of a chunk with the product of the next one. Raises OperatorError where the ranks
    do not divide the input features or the tokens.
    """

    _split = 1

    def forward(self, input: Tensor) -> Tensor:
        """Multiply ``input`` by this rank's share of the weight, and sum over the ranks."""
        bias: Tensor | None = self.bias
        if self.sequence_parallel:
            share_of(input.shape[0], self.ranks, "RowParallelLinear", "tokens")
            products = self._products(ScatteredProducts, row_products)
            bias = None if bias is None else replicated(bias, *self.groups)
        else:
            products = self._products(ReducedProducts, row_products)
        output = _linear(input, self.weight, None, products)
        return output if bias is None else output + bias.to(output.dtype)


@in_autocast_type("input", "weight", "bias")
def _linear(input: Tensor, weight: Tensor, bias: Tensor | None, products: Products) -> Tensor:
    return linear(input, weight, bias, products)
