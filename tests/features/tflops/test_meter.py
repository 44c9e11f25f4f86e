"""Counting of products and of recomputed ones, on plain torch."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mindspeed.features.tflops.meter import OperationCounter, StepMeter
from mindspeed.memory.checkpoint import Checkpoint
from mindspeed.memory.recomputation import is_recomputing, recomputation, watched_functions

PRODUCT = 2 * 3 * 4 * 4


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("product", [torch.matmul, lambda x, weight: Product.apply(x, weight)], ids=["operator", "function"])
def test_a_product_that_a_checkpoint_repeats_is_recomputed(product, reentrant: bool) -> None:
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    with watched_functions(), OperationCounter() as counter:
        checkpoint(lambda x: product(x, weight).sin(), x, use_reentrant=reentrant).sum().backward()
    assert (counter.executed, counter.recomputed) == (4 * PRODUCT, PRODUCT)
    assert "apply" in vars(torch.autograd.Function)


def test_an_operator_with_a_kernel_of_its_own_is_not_decomposed() -> None:
    x, grad = torch.randn(23, 32), torch.randn(23, 32)
    expected = torch.ops.aten.silu_backward(grad, x)
    with OperationCounter():
        counted = torch.ops.aten.silu_backward(grad, x)
    assert torch.equal(counted, expected)


def test_a_forward_pass_that_is_repeated_ahead_of_backward_is_recomputed() -> None:
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    repeated = Checkpoint(lambda x: (x @ weight).sin(), (x,), None)
    with OperationCounter() as counter:
        y = repeated.run()
        repeated.restore()
        y.sum().backward()
    assert (counter.executed, counter.recomputed) == (4 * PRODUCT, PRODUCT)


def test_code_can_say_that_it_recomputes() -> None:
    assert not is_recomputing()
    with recomputation():
        assert is_recomputing()
    assert not is_recomputing()


def test_only_a_counted_step_is_slowed_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    meter, x = StepMeter(3, 600), torch.ones(3, 4)
    counted = []
    for step in range(4):
        with meter.step(step):
            modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
            counted.append(len(modes) > 0)
            x @ x.t()
    assert counted == [True, False, False, True]
    assert meter.metrics()["flops.hardware"] == 2 * 3 * 4 * 3
    assert meter.metrics()["flops.model"] == 600
