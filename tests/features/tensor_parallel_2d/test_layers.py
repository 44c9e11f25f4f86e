"""Layers on a grid beside Megatron's: values, bytes, memory, overlap."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import mindspeed
from benchmarks._linear_layers import FFN, HIDDEN, ROWS, grid_of, hidden_on_grid, on_the_wire, run_both, sent_on_grid
from mindspeed.features.tensor_parallel_2d import costs
from mindspeed.features.tensor_parallel_2d.products import Overlap, column_products, row_products
from mindspeed.tensor_parallel.linear import linear
from mindspeed.workbench.verification.pool import WorkerPool

LONG = pytest.mark.long
NAME = "tensor-parallel-2d"
LAYERS = "mindspeed.features.tensor_parallel_2d.layers:ColumnParallelLinear2D,RowParallelLinear2D"
FURTHER = [pytest.param(*grid, marks=LONG) for grid in ((4, 1), (2, 2), (1, 4))]
GRIDS = [(2, 1), (1, 2), *FURTHER]
TWO_AXES = [pytest.param(2, 1, marks=LONG), (1, 2), *FURTHER]


def plan(x: int, y: int, **platform: Any) -> Any:
    settings = {NAME: {"x": x, "y": y}, "device-emulation": platform}
    return mindspeed.plan(features=[NAME], platform="cpu", settings=settings, world={"world_size": x * y, "tp": x * y})


def both() -> Any:
    """The layers of Megatron and of the feature; their weights are not the same, so that values are compared elsewhere."""
    return run_both(LAYERS, ("sequence parallel", "frozen"))


@pytest.mark.cover(1, because="sizes of both axes are in the rows that run")
@pytest.mark.parametrize(("x", "y"), GRIDS)
def test_bytes_are_those_of_the_formula_and_what_is_kept_is_megatrons(pool: WorkerPool, x: int, y: int) -> None:
    batch = 4 * 2 * ROWS * x * y  # bytes of a number, micro-batch, rows of all ranks
    layers = costs.column(HIDDEN, FFN, x, y), costs.row(HIDDEN, FFN, x, y)
    for rank in pool.call(both, x * y, plan=plan(x, y)):
        megatrons, ours = rank["sequence parallel"]
        assert sent_on_grid(ours.forward, x, y) == batch * sum(layer.forward for layer in layers)
        assert sent_on_grid(ours.backward, x, y) == batch * sum(layer.backward for layer in layers)
        assert ours.saved <= megatrons.saved
        assert rank["frozen"][1].saved <= rank["frozen"][0].saved
        if y == 1:
            for name, value in megatrons.values.items():
                assert torch.equal(ours.values[name], value), name


def differences(x: int, y: int) -> dict[str, float]:
    """The largest difference of each value in fp64 from one process, over all overlap settings and frozen weights."""
    rank, ranks, found = dist.get_rank(), x * y, {}
    grid, (i, j) = grid_of(x, y), divmod(rank, y)
    generator = torch.Generator().manual_seed(5)
    rows, features = (16 * ranks, 2, 8), 12 * ranks
    shapes = {"x": rows, "column": (features, 8), "bias": (features,), "row": (8, features), "g": rows}
    whole = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    one = {name: tensor.clone().requires_grad_() for name, tensor in whole.items()}
    output = torch.tanh(one["x"] @ one["column"].t() + one["bias"]) @ one["row"].t()
    output.backward(whole["g"])

    def block(tensor: torch.Tensor, x_axis: int) -> torch.Tensor:
        return tensor.chunk(x, x_axis)[i].chunk(y, 1 - x_axis)[j].clone()

    for overlap in (Overlap(*map(bool, (n & 1, n & 2, n & 4))) for n in range(8)):
        for frozen in (False, True):
            local = {"x": whole["x"].chunk(ranks)[rank].clone(), "bias": whole["bias"].chunk(ranks)[rank].clone()}
            local |= {"column": block(whole["column"], 0), "row": block(whole["row"], 1)}
            for name, tensor in local.items():
                tensor.requires_grad_(name in ("x", "bias") or not frozen)
            features = linear(local["x"], local["column"], local["bias"], column_products(grid, overlap, lambda rows: 4))
            result = linear(torch.tanh(features), local["row"], None, row_products(grid, overlap, lambda rows: 4))
            result.backward(whole["g"].chunk(ranks)[rank])
            gradients = {name: one[name].grad.chunk(ranks)[rank] for name in ("x", "bias")}
            if not frozen:
                gradients |= {"column": block(one["column"].grad, 0), "row": block(one["row"].grad, 1)}
            pairs = {name: (local[name].grad, gradient) for name, gradient in gradients.items()}
            pairs["output"] = (result.detach(), output.detach().chunk(ranks)[rank])
            for name, (ours, expected) in pairs.items():
                found[name] = max(found.get(name, 0.0), (ours - expected).abs().max().item())
    return found


@pytest.mark.parametrize(("x", "y"), TWO_AXES)
def test_values_and_gradients_are_those_of_one_process(pool: WorkerPool, x: int, y: int) -> None:
    for rank in pool.call(differences, x * y, x, y):
        assert max(rank.values()) < 1e-12, rank


@pytest.mark.parametrize(("x", "y"), TWO_AXES)
def test_each_overlap_setting_hides_what_it_names_unless_it_is_launched_late(pool: WorkerPool, x: int, y: int) -> None:
    for rank in pool.call(hidden_on_grid, x * y, x, y, plan=plan(x, y, link_gbps=1)):
        assert min(rank.values()) >= 0.8, rank


@pytest.mark.long
@pytest.mark.parametrize(("x", "y"), GRIDS)
def test_the_kernel_counts_the_bytes_of_the_formula(pool: WorkerPool, x: int, y: int) -> None:
    for measured, formula in pool.call(on_the_wire, x * y, x, y, plan=mindspeed.plan(platform="cpu")):
        assert formula <= measured <= 1.01 * formula
