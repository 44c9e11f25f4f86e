"""Products in parts of their rows, each part's collective behind the product of another part.

R rows of this rank's share of the sequence, T = R x ranks rows in all; K input and N output features of a product. A part
has equally many rows of every rank; the results of the parts are put back in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed.ops import lcal_coc
from mindspeed.tensor_parallel.linear import WeightGradient, gathered_gradients
from mindspeed.tensor_parallel.pipeline import run_in_parts

Parts: TypeAlias = Callable[[int], int]
"""The number of parts for a number of rows."""


def gather_multiply(x_RK: Tensor, w_KN: Tensor, group: dist.ProcessGroup, parts: int) -> tuple[Tensor, Tensor]:
    """Multiply the rows of all ranks, a part gathered while another is multiplied: the product [T, N], and the parts."""
    ranks, rows, (K, N) = group.size(), x_RK.shape[0] // parts, w_KN.shape
    x_PrK = x_RK.contiguous().view(parts, rows, K)
    x_PtrK = x_RK.new_empty(parts, ranks, rows, K)
    y_tPrN = x_RK.new_empty(ranks, parts, rows, N)

    def gather(part: int, _: None) -> Any:
        return dist.all_gather_into_tensor(x_PtrK[part].view(-1, K), x_PrK[part], group=group, async_op=True)

    def multiply(part: int, gathering: Any) -> None:
        gathering.wait()
        _multiply(x_PtrK[part], w_KN, y_tPrN[:, part])

    run_in_parts(parts, gather, multiply)
    return y_tPrN.view(-1, N), x_PtrK


def multiply_scatter(x_TK: Tensor, w_KN: Tensor, group: dist.ProcessGroup, parts: int) -> Tensor:
    """Sum products over the ranks, part k reduced and scattered while part k + 1 is multiplied: [R, N]."""
    ranks, (K, N) = group.size(), w_KN.shape
    x_tPrK = x_TK.view(ranks, parts, -1, K)
    y_PrN = x_TK.new_empty(parts, x_tPrK.shape[2], N)

    def multiply_and_send(part: int, _: None) -> tuple[Tensor, Any]:
        product_trN = x_TK.new_empty(ranks, x_tPrK.shape[2], N)
        _multiply(x_tPrK[:, part], w_KN, product_trN)
        return product_trN, dist.reduce_scatter_tensor(y_PrN[part], product_trN.view(-1, N), group=group, async_op=True)

    run_in_parts(parts, multiply_and_send, _wait)
    return y_PrN.view(-1, N)


def multiply_reduce(x_TK: Tensor, w_KN: Tensor, group: dist.ProcessGroup, parts: int) -> Tensor:
    """Sum products over the ranks, part k reduced while part k + 1 is multiplied: [T, N] on every rank."""
    (K, N) = w_KN.shape
    x_PrK = x_TK.view(parts, -1, K)
    y_PrN = x_TK.new_empty(parts, x_PrK.shape[1], N)

    def multiply_and_send(part: int, _: None) -> tuple[Tensor, Any]:
        torch.mm(x_PrK[part], w_KN, out=y_PrN[part])
        return y_PrN, dist.all_reduce(y_PrN[part], group=group, async_op=True)

    run_in_parts(parts, multiply_and_send, _wait)
    return y_PrN.view(-1, N)


def _multiply(x_trK: Tensor, w_KN: Tensor, y_trN: Tensor) -> None:
    """Write the product where it belongs. With several parts the rows of ranks are apart: a batched product takes them."""
    if x_trK.is_contiguous() and y_trN.is_contiguous():
        torch.mm(x_trK.view(-1, x_trK.shape[-1]), w_KN, out=y_trN.view(-1, y_trN.shape[-1]))
    else:
        torch.bmm(x_trK, w_KN.expand(len(x_trK), -1, -1), out=y_trN)


def _wait(part: int, sent: tuple[Tensor, Any]) -> None:
    sent[1].wait()


@dataclass(frozen=True, slots=True)
class GatheredProducts:
    """Column-parallel under sequence parallelism: gather the input, multiply; weight [N, K]."""

    group: dist.ProcessGroup
    parts: Parts

    def forward(self, x_RK: Tensor, weight: Tensor) -> Tensor:
        return gather_multiply(x_RK, weight.t(), self.group, self.parts(x_RK.shape[0]))[0]

    def input_gradient(self, g_TN: Tensor, weight: Tensor) -> Tensor:
        return multiply_scatter(g_TN, weight, self.group, self.parts(g_TN.shape[0] // self.group.size()))

    def gradients(
        self, g_TN: Tensor, x_RK: Tensor, weight: Tensor, weight_gradient: WeightGradient
    ) -> tuple[Tensor, Tensor | None]:
        return gathered_gradients(g_TN, x_RK, weight, self.group, weight_gradient)


@dataclass(frozen=True, slots=True)
class ScatteredProducts:
    """Row-parallel under sequence parallelism: multiply, sum over ranks and scatter; weight [N, K]."""

    group: dist.ProcessGroup
    parts: Parts

    def forward(self, x_TK: Tensor, weight: Tensor) -> Tensor:
        return multiply_scatter(x_TK, weight.t(), self.group, self.parts(x_TK.shape[0] // self.group.size()))

    def input_gradient(self, g_RN: Tensor, weight: Tensor) -> Tensor:
        return gather_multiply(g_RN, weight, self.group, self.parts(g_RN.shape[0]))[0]

    def gradients(
        self, g_RN: Tensor, x_TK: Tensor, weight: Tensor, weight_gradient: WeightGradient
    ) -> tuple[Tensor, Tensor | None]:
        """Gather the gradient behind its product with the weight, and use it again for the gradient of the weight.

        Several parts are copied into the order of the other rows, which one product sums.
        """
        grad_input, g_PtrN = gather_multiply(g_RN, weight, self.group, self.parts(g_RN.shape[0]))
        g_TN = g_PtrN.transpose(0, 1).reshape(-1, g_RN.shape[1])
        return grad_input, weight_gradient(g_TN, x_TK)


@dataclass(frozen=True, slots=True)
class ReducedProducts:
    """Row-parallel without sequence parallelism: multiply, sum over ranks; weight [N, K]. Backward has no collective."""

    group: dist.ProcessGroup
    parts: Parts

    def forward(self, x_TK: Tensor, weight: Tensor) -> Tensor:
        return multiply_reduce(x_TK, weight.t(), self.group, self.parts(x_TK.shape[0]))

    def input_gradient(self, g_TN: Tensor, weight: Tensor) -> Tensor:
        return g_TN.matmul(weight)

    def gradients(
        self, g_TN: Tensor, x_TK: Tensor, weight: Tensor, weight_gradient: WeightGradient
    ) -> tuple[Tensor, Tensor | None]:
        return g_TN.matmul(weight), weight_gradient(g_TN, x_TK)


@dataclass(frozen=True, slots=True)
class FusedReducedProducts:
    """Row-parallel without sequence parallelism: the product and its all-reduce are one call. Backward has no collective."""

    group: dist.ProcessGroup

    def forward(self, x_TK: Tensor, weight: Tensor) -> Tensor:
        return lcal_coc.matmul_all_reduce(x_TK, weight.t(), None, self.group)

    def input_gradient(self, g_TN: Tensor, weight: Tensor) -> Tensor:
        return g_TN.matmul(weight)

    def gradients(
        self, g_TN: Tensor, x_TK: Tensor, weight: Tensor, weight_gradient: WeightGradient
    ) -> tuple[Tensor, Tensor | None]:
        return g_TN.matmul(weight), weight_gradient(g_TN, x_TK)
