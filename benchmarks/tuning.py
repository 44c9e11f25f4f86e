"""How long does a search of a million layouts take, and what do tools cost outside their steps?

``python -m benchmarks.tuning``; with ``--measure 300`` it also compares predictions with what workers measure for 300 seconds:
steps of 42 configurations of three models in interleaved rounds, peaks of memory, and counted operations. A round in which a
control drifts by more than 5 % is rejected. What is measured is kept in ``build/tuning-rounds.json``: the command goes on where
an earlier one ended or was killed; other plans, another torch or processor begin anew. With ``MEGATRON_LM_PATH`` its own memory
report stands beside the peaks.
"""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks._published import published_rows
from benchmarks._tuning_runs import accuracy_rows, deterministic_rows, flops_rows, memory_rows
from benchmarks.table import Row, Spent, main, medians, timed
from mindspeed.features.profiler.feature import ProfilerArgs
from mindspeed.features.profiler.window import TraceWindow
from mindspeed.features.tflops.meter import StepMeter
from mindspeed.plugins.discovery import discover
from mindspeed.workbench.tuning.layout_jobs import FixedRequest
from mindspeed.workbench.tuning.search import Question, Resolved, search
from mindspeed.workbench.tuning.space import Layouts, candidates, choices
from mindspeed.workbench.tuning.time import DEFAULTS, Machine

COMMAND = "python -m benchmarks.tuning"
MODEL: dict[str, Any] = {
    "world_size": 1024,
    "num_layers": 32,
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "kv_channels": 128,
    "num_experts": 0,
    "grouped_experts": False,
    "vocab_size": 131072,
    "seq_length": 8192,
    "global_batch_size": 1024,
    "normalization": "RMSNorm",
    "zero_centered_norm": False,
    "gated_linear_unit": True,
    "activation": "silu",
    "rotary": True,
    "tied_embeddings": False,
    "dtype": "bf16",
    "platform": "cuda",
    "megatron": "0.16.1",
}


def search_rows() -> list[Row]:
    catalog = discover(only=())
    layouts = Layouts(MODEL, candidates(MODEL, {}))
    tried = choices(catalog, MODEL, (), ())
    question = Question(layouts, tried, FixedRequest(), Machine(DEFAULTS["cuda"]), 80 * 2**30)
    taken = []

    def once() -> None:
        found = search(question, catalog, lambda op, platform: True, lambda choice, world: Resolved())
        taken.append((found.configurations, found.feasible))

    (spent,) = medians(once, repeat=5)
    configurations, feasible = taken[0]
    million = Spent(spent.cpu / configurations * 1e6, spent.wall / configurations * 1e6)
    note = f"{configurations:,} configurations of 1,024 ranks, {feasible:,} feasible, in {spent.wall:.2f} s"
    return [timed("search of 1,000,000 configurations", 0.5, million, "s", COMMAND, note)]


def idle_rows() -> list[Row]:
    """Time around a step in which a tool has nothing to do."""
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]  # a wait for the device is not the tool's
    meter, window = StepMeter(10**9, 1), TraceWindow(ProfilerArgs(), "cpu")
    meter.executed = 1.0
    rounds = 10_000

    def tflops() -> None:
        for step in range(1, rounds):
            with meter.step(step):
                pass

    def profiler() -> None:
        for _ in range(rounds):
            window.step(1)

    each = medians(tflops, profiler)
    names = ("tflops", "profiler")
    return [
        Row(f"C16: {name} around a step outside its own", 20, spent.cpu / rounds * 1e6, "µs", COMMAND)
        for name, spent in zip(names, each, strict=True)
    ]


def traced_rows() -> list[Row]:
    """What the profiler costs in a step that it traces."""
    values = torch.ones(64, 64)

    def step() -> None:
        for _ in range(500):
            values @ values

    with TemporaryDirectory() as folder:
        window = TraceWindow(ProfilerArgs(start=0, end=10**6, folder=folder), "cpu")

        def traced() -> None:
            with window.step(1) or nullcontext():
                step()

        traced()
        plain, observed = medians(step, traced)
        window.close()
    return [Row("C16: a traced step over a plain one of 500 products", 3, observed.cpu / plain.cpu, "", COMMAND)]


def rows() -> list[Row]:
    start = time.perf_counter()
    measured = [*search_rows(), *idle_rows(), *traced_rows(), *published_rows()]
    if "--measure" in sys.argv:
        place = sys.argv.index("--measure")
        _, budget = sys.argv.pop(place), float(sys.argv.pop(place))
        for part in (flops_rows, memory_rows, deterministic_rows):
            measured += part()
            print(f"{part.__name__}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
        measured += accuracy_rows(budget)
    missed = [row.what for row in measured if not row.met]
    print(f"{time.perf_counter() - start:.0f} s; {len(missed)} of {len(measured)} targets missed")
    return measured


if __name__ == "__main__":
    main(rows)
