"""Megatron's linear layers with products in parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed import plugins as ms
from mindspeed.features.coc.products import FusedReducedProducts, GatheredProducts, ReducedProducts, ScatteredProducts
from mindspeed.tensor_parallel.fused import FusedGatheredProducts, FusedScatteredProducts
from mindspeed.tensor_parallel.layers import ColumnLinear, RowLinear
from mindspeed.tensor_parallel.linear import Products

if TYPE_CHECKING:
    from mindspeed.features.coc.feature import Coc


class CocColumnParallelLinear(ColumnLinear):
    """Gathers its input in parts. Without sequence parallelism it is Megatron's: forward has no collective, and the
    all-reduce of backward is behind the weight gradient already."""

    def products(self, sequence_parallel: bool) -> Products | None:
        feature = _feature()
        if feature is None or not sequence_parallel or self.tp_group.size() == 1:
            return None
        if feature.args.fused:
            return FusedGatheredProducts(self.tp_group)
        return GatheredProducts(self.tp_group, feature.parts_of)


class CocRowParallelLinear(RowLinear):
    """Sums its output over ranks in parts."""

    def products(self, sequence_parallel: bool) -> Products | None:
        feature = _feature()
        if feature is None or self.tp_group.size() == 1:
            return None
        if feature.args.fused:
            return (FusedScatteredProducts if sequence_parallel else FusedReducedProducts)(self.tp_group)
        return (ScatteredProducts if sequence_parallel else ReducedProducts)(self.tp_group, feature.parts_of)


def _feature() -> Coc | None:
    """The active feature; a model that outlives its plan multiplies as Megatron does."""
    feature: Coc | None = ms.active_feature("coc")
    return feature
