"""Products of linear layers fused with their collectives, by the operators of `mindspeed.ops.lcal_coc`.

R rows of this rank's share of the sequence, T rows of all ranks; weights are [N, K].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from mindspeed.ops import lcal_coc
from mindspeed.tensor_parallel.linear import WeightGradient, gathered_gradients


@dataclass(frozen=True, slots=True)
class FusedGatheredProducts:
    """Column-parallel under sequence parallelism: the all-gather of the input and its product are one call."""

    group: dist.ProcessGroup

    def forward(self, x_RK: Tensor, weight: Tensor) -> Tensor:
        return _gathered(x_RK, weight.t(), self.group)

    def input_gradient(self, g_TN: Tensor, weight: Tensor) -> Tensor:
        return _scattered(g_TN, weight, self.group)

    def gradients(
        self, g_TN: Tensor, x_RK: Tensor, weight: Tensor, weight_gradient: WeightGradient
    ) -> tuple[Tensor, Tensor | None]:
        """Both collectives travel behind products, which one call with either of them would not let them."""
        return gathered_gradients(g_TN, x_RK, weight, self.group, weight_gradient)


@dataclass(frozen=True, slots=True)
class FusedScatteredProducts:
    """Row-parallel under sequence parallelism: the product and its reduce-scatter are one call."""

    group: dist.ProcessGroup

    def forward(self, x_TK: Tensor, weight: Tensor) -> Tensor:
        return _scattered(x_TK, weight.t(), self.group)

    def input_gradient(self, g_RN: Tensor, weight: Tensor) -> Tensor:
        return _gathered(g_RN, weight, self.group)

    def gradients(
        self, g_RN: Tensor, x_TK: Tensor, weight: Tensor, weight_gradient: WeightGradient
    ) -> tuple[Tensor, Tensor | None]:
        """The gradient that the call gathers is used again for the gradient of the weight."""
        grad_input, g_TN = lcal_coc.all_gather_matmul_v2(g_RN, weight, None, None, self.group)
        return grad_input, weight_gradient(g_TN, x_TK)


def _gathered(x_RK: Tensor, w_KN: Tensor, group: dist.ProcessGroup) -> Tensor:
    return lcal_coc.all_gather_matmul(x_RK, w_KN, None, group)


def _scattered(x_TK: Tensor, w_KN: Tensor, group: dist.ProcessGroup) -> Tensor:
    return lcal_coc.matmul_reduce_scatter(x_TK, w_KN, None, group)
