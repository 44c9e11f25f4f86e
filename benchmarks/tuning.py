"""How long does a search of a million layouts take, and what do tools cost outside their steps?

``python -m benchmarks.tuning``; with ``--measure STORE`` it also compares predictions with the steps that
``mindspeed tune --calibrate N --store STORE`` has measured: each one is predicted from all others.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.table import Row, main, medians
from mindspeed.features.profiler.feature import ProfilerArgs
from mindspeed.features.profiler.window import Window
from mindspeed.features.tflops.meter import StepMeter
from mindspeed.plugins.discovery import discover
from mindspeed.tuning.rules import FixedRequest
from mindspeed.tuning.search import Question, Resolved, search
from mindspeed.tuning.space import Layouts, candidates, choices
from mindspeed.tuning.store import Measurement, Store
from mindspeed.tuning.time import DEFAULTS, KINDS, Machine, fit, step_seconds

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

    (seconds,) = medians(once, repeat=5)
    configurations, feasible = taken[0]
    million = seconds / configurations * 1e6
    note = f"{configurations:,} configurations of 1,024 ranks, {feasible:,} feasible, in {seconds:.2f} s"
    return [Row("search of 1,000,000 configurations", 0.5, million, "s", COMMAND, note)]


def idle_rows() -> list[Row]:
    """Time around a step in which a tool has nothing to do."""
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]  # a wait for the device is not the tool's
    meter, window = StepMeter(10**9, 1), Window(ProfilerArgs(), "cpu")
    meter.executed = 1.0
    rounds = 10_000

    def tflops() -> None:
        for step in range(1, rounds):
            with meter.step(step):
                pass

    def profiler() -> None:
        for _ in range(rounds):
            window.step(1)

    seconds = medians(tflops, profiler)
    names = ("tflops", "profiler")
    return [
        Row(f"{name} around a step outside its own", 20, spent / rounds * 1e6, "µs", COMMAND)
        for name, spent in zip(names, seconds, strict=True)
    ]


def prediction_rows(folder: Path) -> list[Row]:
    """Compare each measured step of a store with its prediction from all others."""
    for inner in sorted(path for path in folder.glob("*/*") if path.is_dir()):
        store = Store(folder, {}, {})
        store.folder = inner
        found = list(store.measurements().values())
        if len(found) > 3:
            return _compared(found)
    return []


def _compared(found: list[Measurement]) -> list[Row]:
    prior = Machine(DEFAULTS["cpu"])
    predicted = []
    for number, one in enumerate(found):
        others = found[:number] + found[number + 1 :]
        machine = fit([dict(other.work) for other in others], [other.seconds for other in others], prior)
        predicted.append(float(step_seconds({kind: one.work[kind] for kind in KINDS}, machine)))
    measured = np.array([one.seconds for one in found])
    errors = np.abs(np.array(predicted) / measured - 1)
    ranks = np.argsort(np.argsort(predicted)), np.argsort(np.argsort(measured))
    rho = float(np.corrcoef(*ranks)[0, 1])
    regret = float(measured[int(np.argmin(predicted))] / measured.min() - 1)
    note = f"{len(found)} configurations, each predicted from all others"
    return [
        Row("Spearman correlation of predicted and measured steps", 0.97, rho, "", COMMAND, note, least=True),
        Row("regret of the fastest predicted one", 2, 100 * regret, "%", COMMAND, note),
        Row("median error of a step", 5, 100 * float(np.median(errors)), "%", COMMAND, note),
        Row("worst error of a step", 15, 100 * float(errors.max()), "%", COMMAND, note),
    ]


def rows() -> list[Row]:
    start = time.perf_counter()
    measured = [*search_rows(), *idle_rows()]
    if "--measure" in sys.argv:
        measured += prediction_rows(Path(sys.argv[sys.argv.index("--measure") + 1]))
    print(f"{time.perf_counter() - start:.0f} s")
    return measured


if __name__ == "__main__":
    main(rows)
