"""What tests and benchmarks of tensor-parallel linear layers run on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from benchmarks._sockets import bytes_on_sockets
from mindspeed.features.coc import products as coc
from mindspeed.features.device_emulation import link
from mindspeed.features.tensor_parallel_2d import costs
from mindspeed.features.tensor_parallel_2d import products as grid_products
from mindspeed.platforms.collectives import CollectiveTraffic, traffic
from mindspeed.tensor_parallel.linear import plain_weight_gradient

HIDDEN: Final = 16
FFN: Final = 32
ROWS: Final = 32
"""Of the sequence, on each rank; the micro-batch is 2."""


SHARE: Final = 64
WIDTH: Final = 16
"""Rows of a rank, and features on both sides of a linear layer, where overlap is measured."""
SECONDS: Final = 0.02
"""The time of a product there, and of the transfers that it hides."""
SENT: Final = SHARE * WIDTH * 4
"""Bytes of a collective of two ranks there."""


@dataclass
class LayerRun:
    """Outputs and gradients by name, calls and bytes of collectives in both directions, and the bytes kept for backward."""

    values: dict[str, Tensor]
    forward: CollectiveTraffic
    backward: CollectiveTraffic
    saved: int


def linear_layers(
    name: str, sequence_parallel: bool = True, bias: bool = True, hidden: int = HIDDEN, ffn: int = FFN
) -> tuple[Any, Any]:
    """A column and a row layer of the classes in a module, as ``module:Column,Row``, with weights of this rank."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    module, classes = name.split(":")
    column, row = (getattr(import_module(module), cls) for cls in classes.split(","))
    ranks = dist.get_world_size()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=ranks,
        tensor_model_parallel_size=ranks,
        sequence_parallel=sequence_parallel,
        perform_initialization=False,
    )
    common = {"config": config, "init_method": torch.nn.init.zeros_, "bias": bias, "skip_bias_add": False}
    layers = column(hidden, ffn, gather_output=False, **common), row(ffn, hidden, input_is_parallel=True, **common)
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    with torch.no_grad():
        for layer in layers:
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return layers


def run_layers(name: str, sequence_parallel: bool = True, frozen: bool = False) -> LayerRun:
    """One pass forward and backward through `linear_layers`."""
    layers = linear_layers(name, sequence_parallel)
    for layer in layers:
        layer.weight.requires_grad_(not frozen)
    generator = torch.Generator().manual_seed(3 + dist.get_rank() * sequence_parallel)
    x = torch.randn(ROWS, 2, HIDDEN, generator=generator).requires_grad_()
    gradient = torch.randn(ROWS, 2, HIDDEN, generator=generator)
    saved: dict[int, int] = {}
    weights = {parameter.data_ptr() for layer in layers for parameter in layer.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in weights:
            saved[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), traffic() as forward:
        middle, _ = layers[0](x)
        output, _ = layers[1](middle * 1.0)
    with traffic() as backward:
        output.backward(gradient)
    values = {"output": output.detach(), "input": x.grad}
    values |= {f"{i}.{n}": p.grad for i, layer in enumerate(layers) for n, p in layer.named_parameters() if p.grad is not None}
    return LayerRun(values, forward, backward, sum(saved.values()))


CASES: Final = {"sequence parallel": (True, False), "all-reduced": (False, False), "frozen": (True, True)}


def run_both(feature: str, cases: Iterable[str] = tuple(CASES)) -> dict[str, tuple[LayerRun, LayerRun]]:
    """Megatron's layers and those of a feature, case by case."""
    megatrons = "megatron.core.tensor_parallel.layers:ColumnParallelLinear,RowParallelLinear"
    return {case: (run_layers(megatrons, *CASES[case]), run_layers(feature, *CASES[case])) for case in cases}


class Clock:
    """Time that passes in sleeps alone, as `time` for the emulated link: no other load on the machine is measured."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class SlowProducts(TorchDispatchMode):
    """Products take time by their size: ``seconds`` for so many multiplications."""

    def __init__(self, clock: Clock, multiplications: int, seconds: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.clock = clock
        self.seconds_of_one = seconds / multiplications

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            self.clock.sleep(count(*args, **(kwargs or {}), out_val=out) / 2 * self.seconds_of_one)
        return out


def seconds_of(run: Callable[[], Any], multiplications: int, seconds: float, sent: float) -> float:
    """The time of a run in which so many multiplications take so long, and so do ``sent`` bytes on an emulated link."""
    clock, real, speed = Clock(), link.time, link.BYTES_PER_SECOND
    link.BYTES_PER_SECOND = sent / seconds
    link.time = clock  # type: ignore[assignment]
    link._free_at.clear()
    try:
        with SlowProducts(clock, multiplications, seconds):
            run()
    finally:
        link.time, link.BYTES_PER_SECOND = real, speed
    return clock.now


@contextmanager
def launched_late() -> Iterator[None]:
    """Every collective is waited for where it is launched, as code would that does not launch early."""
    names = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single")
    originals = {name: getattr(dist, name) for name in names}

    def late(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            work = original(*args, **kwargs)
            if work is not None:
                work.wait()
            return work

        return call

    for name, original in originals.items():
        setattr(dist, name, late(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def hidden_by_coc(late: bool) -> dict[tuple[str, int], float]:
    """The hidden part of the shorter of computing and communicating, by direction and number of parts."""
    group, ranks = dist.group.WORLD, dist.get_world_size()
    share, whole, weight = torch.ones(SHARE, WIDTH), torch.ones(SHARE * ranks, WIDTH), torch.ones(WIDTH, WIDTH)
    hidden: dict[tuple[str, int], float] = {}
    for parts in (2, 4, 8):
        column, row = (cls(group, {SHARE: parts}.__getitem__) for cls in (coc.GatheredProducts, coc.ScatteredProducts))
        cases = {
            "column forward": (1, column.forward, share, weight),
            "row forward": (1, row.forward, whole, weight),
            "column backward": (2, column.gradients, whole, share, weight, plain_weight_gradient),
        }
        for name, (times, run, *arguments) in cases.items():
            with launched_late() if late else nullcontext():
                seconds = seconds_of(partial(run, *arguments), whole.numel() * WIDTH, SECONDS, SENT)
            hidden[name, parts] = 2 - seconds / (times * SECONDS)
    return hidden


def sent_on_grid(traffic: CollectiveTraffic, x: int, y: int) -> float:
    """Bytes that a rank sends, of what it hands over."""
    ranks = {"X": x, "Y": y}
    total = 0.0
    for (_, group), count in traffic.items():
        size = next((n for axis, n in ranks.items() if f"_{axis}_GROUP" in group), x * y)
        total += count.bytes * (1 - 1 / size)
    return total


def grid_of(x: int, y: int) -> grid_products.Grid:
    """The groups of a grid of all ranks."""
    rows = [dist.new_group([*range(i * y, (i + 1) * y)]) for i in range(x)]
    columns = [dist.new_group([*range(j, x * y, y)]) for j in range(y)]
    i, j = divmod(dist.get_rank(), y)
    return grid_products.Grid(columns[j], rows[i])


def on_the_wire(x: int, y: int, rows: int = 1024, width: int = 128) -> tuple[int, float]:
    """Bytes that this rank sends for a column layer, forward and backward: as the kernel counts them, and by the formula."""
    grid, ranks = grid_of(x, y), x * y
    products = grid_products.column_products(grid, grid_products.Overlap(), lambda rows: 1)
    share, gradient = torch.ones(rows, width), torch.ones(rows * ranks, width // ranks)
    weight = torch.ones(width // x, width // y)

    def both_directions() -> None:
        products.forward(share, weight)
        products.gradients(gradient, share, weight, plain_weight_gradient)
        dist.barrier()

    both_directions()  # connections are made
    before = bytes_on_sockets()
    both_directions()
    return bytes_on_sockets() - before, 4 * rows * ranks * costs.column(width, width, x, y).both


def hidden_on_grid(x: int, y: int) -> dict[str, float]:
    """The part of a transfer that each overlap setting hides, where that takes as long as the product that it is behind."""
    grid, ranks = grid_of(x, y), x * y
    share, features = torch.ones(SHARE, WIDTH), torch.ones(SHARE * ranks, WIDTH // ranks)
    weight = torch.ones(WIDTH // x, WIDTH // y)
    layer, hidden_states = costs.column(WIDTH, WIDTH, x, y), costs.column(WIDTH, 0, x, y).forward
    named = {"gather": hidden_states, "scatter": layer.forward - hidden_states, "backward": layer.backward}
    found = {}
    for setting, numbers in named.items():
        if numbers:
            products = grid_products.column_products(grid, grid_products.Overlap(**{setting: True}), lambda rows: 8)
            run = partial(products.forward, share, weight)
            if setting == "backward":
                run = partial(products.gradients, features, share, weight, plain_weight_gradient)
            times = SHARE * ranks * weight.numel(), SECONDS, 4 * SHARE * ranks * numbers
            with launched_late():
                late = seconds_of(run, *times)
            found[setting] = (late - seconds_of(run, *times)) / SECONDS
    return found
