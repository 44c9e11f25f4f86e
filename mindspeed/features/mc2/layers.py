"""Megatron's linear layers with products that are one call with their collectives."""

from __future__ import annotations

from mindspeed import plugins as ms
from mindspeed.tensor_parallel.fused import FusedGatheredProducts, FusedScatteredProducts
from mindspeed.tensor_parallel.layers import ColumnLinear, RowLinear
from mindspeed.tensor_parallel.linear import Products


class Mc2ColumnParallelLinear(ColumnLinear):
    """Gathers its input and multiplies it in one call."""

    def products(self, sequence_parallel: bool) -> Products | None:
        return FusedGatheredProducts(self.tp_group) if _applies(sequence_parallel, self.tp_group.size()) else None


class Mc2RowParallelLinear(RowLinear):
    """Multiplies and sums over ranks in one call."""

    def products(self, sequence_parallel: bool) -> Products | None:
        return FusedScatteredProducts(self.tp_group) if _applies(sequence_parallel, self.tp_group.size()) else None


def _applies(sequence_parallel: bool, ranks: int) -> bool:
    """A model that outlives its plan multiplies as Megatron does."""
    return sequence_parallel and ranks > 1 and ms.active_feature("mc2") is not None
