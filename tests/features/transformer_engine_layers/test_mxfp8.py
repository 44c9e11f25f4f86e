"""Linear layers in fp8 by the recipe mxfp8: the stored numbers, the three products, and layers of a model."""

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from mindspeed.engine.resolution.request import Layer
from mindspeed.workbench.verification.case import build_case
from mindspeed.workbench.verification.pool import WorkerPool
from mindspeed.workbench.verification.shape import LLAMA, MOE
from tests.features.resolving import refusals

NAME = "transformer-engine-layers"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def stored_slowly(x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Block by block, with the exponent from the logarithm of the largest number."""
    rows = []
    for row in x.flatten(0, -2):
        blocks = []
        for block in row.split(32):
            largest = float(block.abs().max())
            scale = 2.0 ** math.ceil(math.log2(largest / torch.finfo(kind).max)) if largest else 1.0
            blocks.append((block.double() / scale).to(torch.float32).to(kind).double() * scale)
        rows.append(torch.cat(blocks))
    return torch.stack(rows).view(x.shape).to(x.dtype)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("kind", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize(("size", "dtype"), [(64, torch.float32), (40, torch.bfloat16), (1, torch.bfloat16)], ids=str)
def test_blocks_of_32_numbers_share_the_least_power_of_two_that_fits(kind, size, dtype):
    from mindspeed.features.transformer_engine_layers.mxfp8 import rounded

    x = (torch.randn(5, 3, size) * torch.logspace(-6, 6, 15).view(5, 3, 1)).to(dtype)
    x[0, 0] = 0
    y = rounded(x, kind)
    assert torch.equal(y, stored_slowly(x, kind))
    assert torch.equal(rounded(y, kind), y)
    assert torch.equal(rounded(8 * x, kind), 8 * y)
    assert float((y - x).abs().max() / x.abs().max()) < 2 ** -(3 if kind == E4M3 else 2)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("into_main", [False, True])
def test_each_product_rounds_both_operands_along_the_dimension_that_it_sums(into_main):
    from mindspeed.features.transformer_engine_layers import mxfp8

    x = torch.randn(7, 2, 96, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(48, 96, dtype=torch.bfloat16, requires_grad=True)
    b = torch.randn(48, dtype=torch.bfloat16, requires_grad=True)
    w.main_grad = torch.ones(48, 96)
    recipe = mxfp8.Mxfp8Recipe(backward=E5M2)
    y = mxfp8.product(recipe, x, w, b, into_main, False, False, None)
    dy = torch.randn_like(y)
    y.backward(dy)
    slow = [stored_slowly(t.detach(), E4M3).double() for t in (x, w)]
    torch.testing.assert_close(y.double(), slow[0] @ slow[1].t() + b.double(), rtol=1e-2, atol=1e-1)
    rows = stored_slowly(dy, E5M2).double() @ stored_slowly(w.detach().t(), E4M3).double().t()
    torch.testing.assert_close(x.grad.double(), rows, rtol=1e-2, atol=1e-1)
    tokens = x.detach().flatten(0, 1)
    expected = stored_slowly(dy.flatten(0, 1).t(), E5M2).double() @ stored_slowly(tokens.t(), E4M3).double().t()
    torch.testing.assert_close(b.grad.double(), dy.double().sum((0, 1)), rtol=2e-2, atol=1e-1)
    if into_main:
        torch.testing.assert_close(w.main_grad.double(), expected + 1, rtol=1e-5, atol=1e-4)
        assert w.grad_added_to_main_grad
    else:
        torch.testing.assert_close(w.grad.double(), expected, rtol=1e-2, atol=1e-1)
        assert torch.equal(w.main_grad, torch.ones(48, 96))


@pytest.mark.usefixtures("on_cpu")
def test_an_expert_without_tokens_has_a_gradient_of_zero():
    from mindspeed.features.transformer_engine_layers import mxfp8

    x, w = torch.randn(0, 40, requires_grad=True), torch.randn(48, 40, requires_grad=True)
    mxfp8.product(mxfp8.Mxfp8Recipe(), x, w, None, False, False, False, None).sum().backward()
    assert x.grad.shape == (0, 40)
    assert not w.grad.any()


FP8 = {"fp8": "e4m3", "fp8_recipe": "mxfp8"}


def counted_steps(recipe: Any) -> tuple[list[float], dict[str, torch.Tensor], int, list[str]]:
    """Return losses, gradients by name, the fp8 products of a forward pass, and the roles that made them."""
    from mindspeed.features.transformer_engine_layers import delayed, mxfp8
    from tests.memory.adam_steps import adam_run

    roles: list[str] = []
    plain = delayed.DelayedWeightGradients.product

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if mxfp8.active() is not None:
            roles.append(type(self).__name__)
        return plain(self, *args, **kwargs)

    delayed.DelayedWeightGradients.product = counted
    try:
        with adam_run(recipe) as run:
            run.train_step(0)
            gradients = {name: p.main_grad.clone() for name, p in run.chunks[0].named_parameters()}
            return list(run.record.losses.values()), gradients, len(roles), sorted(set(roles))
    finally:
        delayed.DelayedWeightGradients.product = plain


@cache
def trained(pool: WorkerPool, shape: Any) -> Any:
    case = build_case([NAME], [Layer("test", settings={NAME: {"replace": True}}, world={"dtype": "bf16"})], (), 1)
    return pool.call(counted_steps, 1, replace(case.recipe, shape=shape, steps=1), plan=case.plan)[0]


@pytest.mark.parametrize(
    ("shape", "roles"),
    [
        (LLAMA, ["TELayerNormColumnParallelLinear", "TERowParallelLinear"]),
        pytest.param(replace(MOE, grouped_experts=True), ["TEColumnParallelGroupedLinear"], marks=pytest.mark.long),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_every_linear_layer_of_a_model_multiplies_in_fp8(pool: WorkerPool, shape: Any, roles: list[str]) -> None:
    losses, gradients, products, _ = trained(pool, shape)
    assert products == 0
    fp8_losses, fp8_gradients, products, found = trained(pool, shape.with_options(FP8))
    assert products > 0
    assert set(roles) <= set(found)
    for one, other in zip(losses, fp8_losses, strict=True):
        assert 0 < abs(one - other) < 0.05 * abs(one)
    plain, found_gradients = (torch.cat([g.flatten() for g in each.values()]) for each in (gradients, fp8_gradients))
    assert float((found_gradients - plain).norm()) < 0.5 * float(plain.norm())  # of a tiny model in which experts may change


def test_recomputed_layers_multiply_in_fp8_again(pool: WorkerPool) -> None:
    again = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    losses, gradients, products, _ = trained(pool, LLAMA.with_options(FP8))
    same_losses, same_gradients, twice, _ = trained(pool, LLAMA.with_options(FP8 | again))
    assert (same_losses, twice) == (losses, 2 * products)
    assert [name for name in gradients if not torch.equal(gradients[name], same_gradients[name])] == []


def test_other_recipes_are_refused_with_the_one_that_works() -> None:
    fp8 = {"transformer_engine_layers": True, "low_precision": True}
    (refused,) = refusals(NAME, **fp8, low_precision_recipe="delayed")
    assert refused.startswith(
        f"MS304 {NAME}: linear layers multiply by the recipe delayed, but {NAME} supports only mxfp8. Transformer Engine's "
        "original layers support the others | "
    )
    assert refusals(NAME, **fp8, low_precision_recipe="mxfp8") == []
