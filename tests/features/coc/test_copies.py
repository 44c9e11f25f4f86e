"""Bytes that products in several parts copy, on the first of two ranks: the other one is not there."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed.features.coc.products import (
    GatheredProducts,
    ReducedProducts,
    ScatteredProducts,
    gather_multiply,
    multiply_scatter,
)

RANKS, ROWS, INNER, OUTER = 2, 32, 48, 64
COPIES = {"copy_", "clone", "_to_copy", "contiguous", "cat"}


class Copies(TorchDispatchMode):
    """Count the bytes that operators copy."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name.removeprefix("aten::") in COPIES:
            self.bytes += result.numel() * result.element_size()
        return result


@pytest.fixture(autouse=True)
def _one_of_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    done = SimpleNamespace(wait=lambda: None)

    def gather(out: Tensor, rows: Tensor, **more: Any) -> Any:
        with torch._C._DisableTorchDispatch():
            out.view(RANKS, *rows.shape).copy_(rows)
        return done

    def scatter(out: Tensor, rows: Tensor, **more: Any) -> Any:
        with torch._C._DisableTorchDispatch():
            out.copy_(rows.view(RANKS, *out.shape).sum(0))
        return done

    monkeypatch.setattr(dist, "all_gather_into_tensor", gather)
    monkeypatch.setattr(dist, "reduce_scatter_tensor", scatter)
    monkeypatch.setattr(dist, "all_reduce", lambda rows, **more: done)


GROUP: Any = SimpleNamespace(size=lambda: RANKS)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_products_in_parts_copy_nothing(parts: int) -> None:
    x_RK, x_TK = torch.randn(ROWS, INNER), torch.randn(RANKS * ROWS, INNER)
    weight = torch.randn(OUTER, INNER)
    with Copies() as copies:
        gathered = GatheredProducts(GROUP, lambda rows: parts)
        y = gathered.forward(x_RK, weight)
        gathered.input_gradient(y, weight)
        scattered = ScatteredProducts(GROUP, lambda rows: parts)
        z = scattered.forward(x_TK, weight)
        scattered.input_gradient(z, weight)
        ReducedProducts(GROUP, lambda rows: parts).forward(x_TK, weight)
    assert copies.bytes == 0
    torch.testing.assert_close(y, torch.cat([x_RK @ weight.t()] * RANKS))
    torch.testing.assert_close(z, (x_TK @ weight.t()).view(RANKS, ROWS, -1).sum(0))


@pytest.mark.parametrize(("parts", "copied"), [(1, 0), (4, 1)])
def test_a_gradient_gathered_in_parts_is_copied_once_for_the_weight(parts: int, copied: int) -> None:
    gradient, x, weight = torch.randn(ROWS, OUTER), torch.randn(RANKS * ROWS, INNER), torch.randn(OUTER, INNER)
    with Copies() as copies:
        products = ScatteredProducts(GROUP, lambda rows: parts)
        _, of_weight = products.gradients(gradient, x, weight, lambda g, x: g.t() @ x)
    assert copies.bytes == copied * RANKS * gradient.numel() * gradient.element_size()
    torch.testing.assert_close(of_weight, torch.cat([gradient] * RANKS).t() @ x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_have_the_bits_of_the_whole(dtype: torch.dtype) -> None:
    x, weight = torch.randn(ROWS, INNER).to(dtype), torch.randn(INNER, OUTER).to(dtype)
    whole, back = gather_multiply(x, weight, GROUP, 1)[0], multiply_scatter(torch.cat([x, x]), weight, GROUP, 1)
    for parts in (2, 4):
        assert torch.equal(gather_multiply(x, weight, GROUP, parts)[0], whole)
        assert torch.equal(multiply_scatter(torch.cat([x, x]), weight, GROUP, parts), back)
