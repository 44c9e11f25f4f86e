"""What do the linear layers of tensor parallelism send, hide and keep? Two ranks of gloo beside an emulated link.

``python -m benchmarks.tensor_parallel``. Bytes are counted at the process groups. Overlap is measured on a clock that products
and transfers alone advance: a transfer takes as long as the product that hides it, so other load on the machine is not in the
numbers. Times of layers in one part are CPU seconds of a rank, beside Megatron's own layers in turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import mindspeed
from benchmarks._linear_layers import (
    FFN,
    HIDDEN,
    ROWS,
    LayerRun,
    hidden_by_coc,
    hidden_on_grid,
    linear_layers,
    run_both,
    sent_on_grid,
)
from benchmarks.table import Row, main
from mindspeed.features.tensor_parallel_2d import costs
from mindspeed.plugins import World
from mindspeed.workbench.verification.pool import WorkerPool

COMMAND: Final = "python -m benchmarks.tensor_parallel"
MEGATRONS: Final = "megatron.core.tensor_parallel.layers:ColumnParallelLinear,RowParallelLinear"
LAYERS: Final = {
    "coc": "mindspeed.features.coc.layers:CocColumnParallelLinear,CocRowParallelLinear",
    "mc2": "mindspeed.features.mc2.layers:Mc2ColumnParallelLinear,Mc2RowParallelLinear",
    "tensor-parallel-2d": "mindspeed.features.tensor_parallel_2d.layers:ColumnParallelLinear2D,RowParallelLinear2D",
}
SETTINGS: Final[dict[str, dict[str, Any]]] = {"coc": {"parts": 4}, "mc2": {}, "tensor-parallel-2d": {"x": 1, "y": 2}}
WIDE: Final = 512
"""Hidden size, and rows of a rank, of the layers whose time is measured."""
LLAMA_405B: Final = {
    "hidden_size": 16384,
    "ffn_hidden_size": 53248,
    "num_attention_heads": 128,
    "num_query_groups": 8,
    "gated_linear_unit": True,
}


def counted(name: str) -> tuple[LayerRun, LayerRun]:
    """Megatron's layers and those of a feature on this rank: what they send and keep."""
    return run_both(LAYERS[name], ("sequence parallel",))["sequence parallel"]


def times(name: str, turns: int = 30) -> float:
    """The CPU seconds of a feature's layers as a share of Megatron's, forward and backward: the median of pairs in turn."""
    import torch

    pair = [linear_layers(classes, bias=False, hidden=WIDE, ffn=4 * WIDE) for classes in (MEGATRONS, LAYERS[name])]
    x = torch.randn(WIDE, 1, WIDE).requires_grad_()

    def seconds(layers: Any) -> float:
        start = time.process_time()
        layers[1](layers[0](x)[0])[0].sum().backward()
        return time.process_time() - start

    for layers in pair:
        seconds(layers)
    return statistics.median(seconds(pair[1]) / seconds(pair[0]) for _ in range(turns))


def plan(name: str, ranks: int = 2, **settings: Any) -> Any:
    slow = {"link_gbps": 1} if settings.pop("link", False) else {}
    given = {name: {**SETTINGS[name], **settings}, "device-emulation": slow}
    return mindspeed.plan(features=[name], platform="cpu", settings=given, world={"world_size": ranks, "tp": ranks})


def rows() -> list[Row]:
    made = [model_row()]
    with WorkerPool(search_path=[str(Path(__file__).resolve().parents[1])]) as pool:
        for name in LAYERS:
            made += counted_rows(name, pool.call(counted, 2, name, plan=plan(name)))
        made += overlap_rows(pool)
        made += time_rows(pool.call)
    return made


def model_row() -> Row:
    """Bytes of a layer of Llama 3 405B over sixteen ranks, by the formula that `features plan` prints."""
    world = World({"tp": 16, **LLAMA_405B})
    share = costs.layer_numbers(world, 8, 2) / costs.layer_numbers(world, 16, 1)
    what = "tensor-parallel-2d, a layer of Llama 3 405B on 16 ranks as 8x2, forward and backward: bytes / one dimension"
    return Row(what, 0.7, share, "x", COMMAND)


def counted_rows(name: str, ranks: Any) -> list[Row]:
    """Bytes and kept activations of two layers, beside the formula or Megatron."""
    megatrons, ours = ranks[0]
    x, y = (1, 2) if name == "tensor-parallel-2d" else (2, 1)
    layers = costs.column(HIDDEN, FFN, x, y), costs.row(HIDDEN, FFN, x, y)
    formula = 4 * 2 * ROWS * 2 * sum(layer.both for layer in layers)
    measured = sent_on_grid(ours.forward, x, y) + sent_on_grid(ours.backward, x, y)
    base = f"{name}, a column and a row layer on 2 ranks, forward and backward"
    return [
        Row(f"{base}: bytes / formula", 1.0, measured / formula, "x", COMMAND),
        Row(f"{base}: activations kept / Megatron's", 1.0, ours.saved / megatrons.saved, "x", COMMAND),
    ]


def overlap_rows(pool: WorkerPool) -> list[Row]:
    """The hidden share of transfers that take as long as the products."""
    made = []
    for (direction, parts), share in pool.call(hidden_by_coc, 2, False, plan=plan("coc", link=True))[0].items():
        what = f"coc, {direction} in {parts} parts: hidden part of the transfers"
        made.append(Row(what, 0.9 * (1 - 1 / parts), share, "", COMMAND, least=True))
    for setting, share in pool.call(hidden_on_grid, 2, 1, 2, plan=plan("tensor-parallel-2d", link=True))[0].items():
        what = f"tensor-parallel-2d as 1x2, overlap_{setting}: hidden part of what it names"
        made.append(Row(what, 0.8, share, "", COMMAND, least=True))
    return made


def time_rows(call: Callable[..., Any]) -> list[Row]:
    """Layers in one part, or on a grid with y = 1, beside Megatron's."""
    what = "a column and a row layer on 2 ranks, forward and backward: time / Megatron's"
    coc = statistics.mean(call(times, 2, "coc", plan=plan("coc", parts=1, mode=2)))
    grid = statistics.mean(call(times, 2, "tensor-parallel-2d", plan=plan("tensor-parallel-2d", x=2, y=1)))
    return [
        Row(f"coc in one part, {what}", 1.02, coc, "x", COMMAND),
        Row(f"tensor-parallel-2d as 2x1, {what}", 1.02, grid, "x", COMMAND),
    ]


if __name__ == "__main__":
    main(rows)
