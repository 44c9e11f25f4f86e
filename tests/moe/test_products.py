from typing import Any

import pytest
import torch

from mindspeed.features.grouped_matmul_add.layers import AccumulatingExperts
from mindspeed.moe import products
from mindspeed.moe.products import Operands, deferred, grouped_product

ENDS = torch.tensor([3, 3, 8])


def experts_weight(dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    """Three experts, 4 to 6, in the shape that Megatron gives their parameter."""
    return torch.nn.Parameter(torch.randn(3 * 4, 6).to(dtype))


def one_by_one(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    matrices = weight.view(3, 4, 6)
    return torch.cat([x[start:end] @ matrices[e] for e, (start, end) in enumerate([(0, 3), (3, 3), (3, 8)])])


def product(x: torch.Tensor, weight: torch.Tensor, **how: Any) -> torch.Tensor:
    return grouped_product(x, deferred(weight, 3, 4, **how), ENDS)


def test_rows_are_multiplied_by_the_matrix_of_their_expert_and_an_idle_expert_gets_a_gradient_of_zero() -> None:
    x, weight = torch.randn(8, 4, requires_grad=True), experts_weight()
    y, expected = product(x, weight), one_by_one(x, weight)
    torch.testing.assert_close(y, expected)
    ours, theirs = (torch.autograd.grad(result.square().sum(), (x, weight)) for result in (y, expected))
    torch.testing.assert_close(ours, theirs)
    assert not ours[1].view(3, 4, 6)[1].any()


def test_parts_of_the_experts_add_up_to_one_gradient() -> None:
    x, weight = torch.randn(8, 4, requires_grad=True), experts_weight()
    entered = deferred(weight, 3, 4)
    parts = [grouped_product(x[:3], entered, ENDS[:2]), grouped_product(x[3:], entered, ENDS[2:] - 3, first=2)]
    torch.testing.assert_close(torch.cat(parts), one_by_one(x, weight))
    ours = torch.autograd.grad(torch.cat(parts).square().sum(), (x, weight))
    torch.testing.assert_close(ours, torch.autograd.grad(one_by_one(x, weight).square().sum(), (x, weight)))


def test_slices_of_experts_are_one_product_of_the_gradient() -> None:
    x, weight, ends = torch.randn(8, 4, requires_grad=True), experts_weight(), []

    def gradient(parameter: torch.Tensor, operands: Operands) -> torch.Tensor:
        ends.append((operands.first, operands.ends.tolist()))
        return products.weight_gradient(parameter, operands)

    def answers(slices: list[tuple[int, int, int]]) -> torch.Tensor:
        entered = deferred(weight, 3, 4, gradient)
        parts = [grouped_product(x[a:b], entered, torch.tensor([b - a]), first=expert) for expert, a, b in slices]
        return torch.cat(parts)

    def gradients(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(y.square().sum(), (x, weight))

    matrices = weight.view(3, 4, 6)
    everything = answers([(0, 0, 2), (0, 2, 3), (1, 3, 4), (2, 4, 6), (2, 6, 8)])
    expected = torch.cat([x[:3] @ matrices[0], x[3:4] @ matrices[1], x[4:] @ matrices[2]])
    torch.testing.assert_close(gradients(everything), gradients(expected))
    assert ends == [(0, [3, 4, 8])]
    with_an_idle_one = answers([(0, 0, 2), (0, 2, 4), (2, 4, 8)])
    expected = torch.cat([x[:4] @ matrices[0], x[4:] @ matrices[2]])
    torch.testing.assert_close(gradients(with_an_idle_one), gradients(expected))


def test_the_gradient_of_a_weight_is_computed_where_it_entered_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, steps = torch.randn(8, 4, requires_grad=True), experts_weight(), []

    class Mark(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rows: torch.Tensor, name: str) -> torch.Tensor:
            ctx.name = name
            return rows.view_as(rows)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
            steps.append(ctx.name)
            return grads[0], None

    def gradient(parameter: torch.Tensor, operands: Operands) -> torch.Tensor:
        steps.append("weight")
        return products.weight_gradient(parameter, operands)

    posted = Mark.apply(x, "post")  # type: ignore[no-untyped-call]
    entered = deferred(weight, 3, 4, gradient)
    y = grouped_product(Mark.apply(posted, "wait"), entered, ENDS)  # type: ignore[no-untyped-call]
    torch.autograd.backward(y.sum())
    assert steps == ["wait", "weight", "post"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_is_added_to_what_the_buffer_has_and_megatrons_hook_is_told(dtype: torch.dtype) -> None:
    x, weight = torch.randn(8, 4).to(dtype), experts_weight(dtype)
    weight.main_grad, weight.grad_added_to_main_grad = torch.ones(12, 6), False  # type: ignore[attr-defined]
    wide = weight.detach().double().requires_grad_()
    torch.autograd.backward(product(x, weight, gradient=AccumulatingExperts().weight_gradient).sum())
    (expected,) = torch.autograd.grad(one_by_one(x.double(), wide).sum(), wide)
    assert weight.grad_added_to_main_grad is True  # type: ignore[attr-defined]
    torch.testing.assert_close(weight.main_grad.double(), 1 + expected, rtol=1e-5, atol=1e-5)  # type: ignore[attr-defined]


@pytest.mark.parametrize("buffer", [torch.bfloat16, None], ids=["a buffer that is not fp32", "no hook that asks"])
def test_without_a_wide_buffer_or_a_hook_the_gradient_goes_the_usual_way(buffer: torch.dtype | None) -> None:
    weight = experts_weight(torch.bfloat16)
    weight.main_grad = torch.zeros(12, 6, dtype=buffer or torch.float32)  # type: ignore[attr-defined]
    if buffer is not None:
        weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    torch.autograd.backward(product(torch.randn(8, 4).bfloat16(), weight, gradient=AccumulatingExperts().weight_gradient).sum())
    assert weight.grad is not None
    assert bool(weight.grad.any())
    assert not weight.main_grad.any()  # type: ignore[attr-defined]
