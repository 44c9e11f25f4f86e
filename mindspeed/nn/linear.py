"""Linear layers of tensor parallelism: the products and collectives of `mindspeed.tensor_parallel` in torch's module."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import Self

from mindspeed.features.coc.products import GatheredProducts, Parts, ReducedProducts, ScatteredProducts
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
        group = group_of(mesh, name)
        if chunks < 1:
            refuse(f"{name}: chunks is {chunks}", "pass chunks=1 or more")
        sizes = [out_features, in_features]
        sizes[self._split] = share_of(sizes[self._split], group.size(), name, ("output", "input")[self._split] + " features")
        self.ranks = group.size()  # before the constructor, which draws the weight
        super().__init__(sizes[1], sizes[0], bias, device, dtype)
        self._group = name_of(name, group)
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
        rank = made.group.rank()
        with torch.no_grad():
            made.weight.copy_(whole.weight.chunk(made.ranks, cls._split)[rank])
            if whole.bias is not None:
                made.bias.copy_(whole.bias if cls._split else whole.bias.chunk(made.ranks)[rank])
        return made

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that the layer is split over."""
        return group_of_name(self._group)

    @property
    def _parts(self) -> Parts:
        return partial(parts_that_fit, "coc", self.chunks)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, ranks={self.ranks}, sequence_parallel={self.sequence_parallel}, chunks={self.chunks}"


class ColumnParallelLinear(_ParallelLinear):
    """Replaces ``torch.nn.Linear``: each rank computes an equal share of the output features (arXiv 1909.08053).

    ``mesh`` is a `DeviceMesh` of one dimension or a process group. ``weight`` is [out_features / ranks, in_features], ``bias``
    the same share. The input is [..., in_features], equal on all ranks, of the types of ``nn.Linear``, autocast included. The
    output has this rank's features.

    With ``sequence_parallel`` the input is [tokens here, ..., in_features], and the output has the tokens of all ranks.
    ``chunks`` then splits the all-gather and the product, each transfer overlapped with the product of another chunk; fewer
    where the rows are not divisible. Let the random numbers of ranks differ when weights are drawn, or use `from_linear`.
    Raises OperatorError where the ranks do not divide the output features.
    """

    _split = 0

    def forward(self, input: Tensor) -> Tensor:
        """Multiply ``input`` by this rank's share of the weight."""
        if self.sequence_parallel:
            return _linear(input, self.weight, self.bias, GatheredProducts(self.group, self._parts))
        return functional.linear(replicated(input, self.group), self.weight, self.bias)


class RowParallelLinear(_ParallelLinear):
    """Replaces ``torch.nn.Linear``: each rank has an equal share of the input features, and outputs are summed over ranks.

    ``mesh``, types and ``from_linear`` are those of `ColumnParallelLinear`, whose output is the input of this layer. ``weight``
    is [out_features, in_features / ranks]. ``bias`` is whole, equal on all ranks, and added once. The output is
    [..., out_features], equal on all ranks, or with ``sequence_parallel`` that of this rank's tokens, which are split in
    dimension 0. ``chunks`` overlaps the sum of a chunk with the product of the next one. Raises OperatorError where the ranks
    do not divide the input features or the tokens.
    """

    _split = 1

    def reset_parameters(self) -> None:
        """Draw the weight as ``nn.Linear`` does for all input features."""
        super().reset_parameters()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(self.ranks**-0.5)

    def forward(self, input: Tensor) -> Tensor:
        """Multiply ``input`` by this rank's share of the weight, and sum over the ranks."""
        products: Products = ReducedProducts(self.group, self._parts)
        bias: Tensor | None = self.bias
        if self.sequence_parallel:
            share_of(input.shape[0], self.ranks, "RowParallelLinear", "tokens")
            products = ScatteredProducts(self.group, self._parts)
            bias = None if bias is None else replicated(bias, self.group)
        output = _linear(input, self.weight, None, products)
        return output if bias is None else output + bias.to(output.dtype)


@in_autocast_type("input", "weight", "bias")
def _linear(input: Tensor, weight: Tensor, bias: Tensor | None, products: Products) -> Tensor:
    return linear(input, weight, bias, products)
