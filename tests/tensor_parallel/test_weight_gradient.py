"""The gradient of a weight goes where Megatron's own linear layers put it."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from mindspeed.features.matmul_add.layers import decided_by_weight
from mindspeed.tensor_parallel.linear import linear
from mindspeed.tensor_parallel.pipeline import run_in_parts


class Product:
    """A product without collectives."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.t()

    def input_gradient(self, g: Tensor, weight: Tensor) -> Tensor:
        return g @ weight

    def gradients(self, g: Tensor, x: Tensor, weight: Tensor, weight_gradient):
        return g @ weight, weight_gradient(g, x)


def buffered(requires_grad: bool = True) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.randn(6, 4), requires_grad=requires_grad)
    weight.main_grad = torch.ones(6, 4)
    weight.grad_added_to_main_grad = False
    return weight


def test_it_is_a_new_tensor_unless_a_kernel_adds_it():
    from mindspeed.tensor_parallel.weight_gradient import weight_gradient

    weight, x = buffered(), torch.randn(5, 2, 4)
    linear(x, weight, None, Product(), weight_gradient(weight, False)).sum().backward()
    torch.testing.assert_close(weight.grad, x.sum((0, 1)).expand(6, 4))
    assert torch.equal(weight.main_grad, torch.ones(6, 4))


def test_a_kernel_under_megatrons_name_adds_it_to_the_buffer_and_marks_the_weight(monkeypatch: pytest.MonkeyPatch):
    from megatron.core.tensor_parallel import layers

    from mindspeed.tensor_parallel.weight_gradient import weight_gradient

    def add(x: Tensor, g: Tensor, main_grad: Tensor) -> None:
        main_grad.add_(g.t() @ x)

    weight, x = buffered(), torch.randn(5, 2, 4)
    gradient = weight_gradient(weight, True)
    kernels = SimpleNamespace(wgrad_gemm_accum_fp32=add)
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", kernels, raising=False)
    weight.zero_out_wgrad = True
    linear(x, weight, None, Product(), gradient).sum().backward()
    torch.testing.assert_close(weight.main_grad, 1 + x.sum((0, 1)).expand(6, 4))
    assert weight.grad_added_to_main_grad
    assert torch.equal(weight.grad, torch.zeros(6, 4)), "hooks get a gradient without content"


def test_matmul_add_decides_by_the_weight():
    adds = decided_by_weight(lambda weight, requested: requested)
    assert adds(buffered(), False)
    assert not adds(torch.nn.Parameter(torch.ones(2, 2)), True)


def test_a_frozen_weight_keeps_no_input_and_its_bias_still_learns():
    weight, bias = buffered(requires_grad=False), torch.nn.Parameter(torch.zeros(6))
    x = torch.randn(5, 2, 4, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        y = linear(x, weight, bias, Product())
    y.sum().backward()
    assert [tensor.data_ptr() for tensor in kept] == [weight.data_ptr()]
    torch.testing.assert_close(x.grad, weight.sum(0).expand(5, 2, 4))
    assert torch.equal(bias.grad, torch.full((6,), 10.0))


def test_each_part_is_one_stage_behind_the_part_before_it():
    events: list[tuple[str, int]] = []

    def stage(name: str):
        return lambda part, value: events.append((name, part))

    run_in_parts(3, stage("gather"), stage("multiply"))
    assert events == [
        ("gather", 0),
        ("gather", 1),
        ("multiply", 0),
        ("gather", 2),
        ("multiply", 1),
        ("multiply", 2),
    ]
