"""Kernels and bytes beside the products of torch_npu that are fused with a collective."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from mindspeed.ops import lcal_coc, process_groups
from tests.npu_contract import bodies
from tests.npu_contract.beside import count

RANKS, ROWS, INNER, OUTER = 2, 64, 256, 128


def _all_reduce(x1: Tensor, x2: Tensor, hcom: str, **more: Any) -> Tensor:
    return x1 @ x2


def _gather(x1: Tensor, x2: Tensor, hcom: str, world_size: int, **more: Any) -> tuple[Tensor, Tensor]:
    rows = torch.cat([x1] * world_size)
    return rows @ x2, rows


def _scatter(x1: Tensor, x2: Tensor, hcom: str, world_size: int, **more: Any) -> Tensor:
    return (x1 @ x2).unflatten(0, (world_size, -1))[0].clone()


BODIES = {"npu_mm_all_reduce_base": _all_reduce, "npu_all_gather_base_mm": _gather, "npu_mm_reduce_scatter_base": _scatter}
GROUP: Any = SimpleNamespace(group_name="tp", size=lambda: RANKS)


@pytest.fixture(autouse=True)
def _one_of_two_ranks() -> Iterator[None]:
    known = {"size_of": lambda group: RANKS, "hccl_name": lambda group: group}
    with bodies.installed(BODIES), patch.multiple(process_groups, **known), patch.object(lcal_coc, "size_of", known["size_of"]):
        yield


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w: lcal_coc.matmul_all_reduce(x, w, None, GROUP),
        lambda x, w: lcal_coc.all_gather_matmul(x, w, None, GROUP),
        lambda x, w: lcal_coc.all_gather_matmul_v2(x, w, None, None, GROUP),
        lambda x, w: lcal_coc.matmul_reduce_scatter(x, w, None, GROUP),
    ],
    ids=["all-reduce", "all-gather", "all-gather, with the rows", "reduce-scatter"],
)
def test_a_product_fused_with_a_collective_is_one_call(call: Callable[[Tensor, Tensor], Any]) -> None:
    x, weight = torch.randn(ROWS, INNER).bfloat16(), torch.randn(OUTER, INNER).bfloat16()
    found = count(lambda: call(x, weight.t()))
    assert found.direct > 0
    assert (found.kernels, found.bytes, found.reads) == (0, 0, 0)


def test_an_output_of_the_caller_costs_a_copy_of_it() -> None:
    x, weight = torch.randn(ROWS, INNER).bfloat16(), torch.randn(INNER, OUTER).bfloat16()
    found = count(lambda: lcal_coc.matmul_all_reduce(x, weight, torch.empty(ROWS, OUTER, dtype=x.dtype), GROUP))
    assert (found.kernels, found.bytes) == (1, 2 * ROWS * OUTER * x.element_size())
