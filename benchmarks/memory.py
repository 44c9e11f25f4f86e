"""What memory features save and cost: bytes of a layer, of the optimizer at rest and in its windows, and the time of a step.

``python -m benchmarks.memory``. One process of the CPU platform trains a Llama-style model in bf16 with plain Adam. The runs
without and with a feature alternate, and the ratio is the median over the pairs of the CPU time of their fastest steps behind
the first two.
The bytes of a layer are half of what a micro-batch keeps more in four layers than in two, divided by s x b x h.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from benchmarks._memory_jobs import JOBS, foretold_and_measured
from benchmarks.table import Row, main
from mindspeed import registry
from mindspeed.engine.resolution.request import Layer
from mindspeed.memory.choice import EXACT, Option, choose
from mindspeed.memory_planner.plans import stages_of
from mindspeed.workbench.verification.case import build_case
from mindspeed.workbench.verification.pool import WorkerPool
from mindspeed.workbench.verification.shape import GptShape, Recipe

COMMAND: Final = "python -m benchmarks.memory"
PARTS: Final = 16
TURNS: Final = 12
STEPS: Final = 6
WARM: Final = 2
SHAPE: Final = GptShape(
    "llama",
    num_layers=2,
    hidden_size=128,
    ffn_hidden_size=352,
    num_query_groups=4,
    vocab_size=512,
    seq_length=128,
    normalization="RMSNorm",
    gated_linear_unit=True,
    activation="silu",
    linear_bias=False,
    rotary=True,
    tied_embeddings=False,
)
RECIPE: Final = Recipe(SHAPE, "bf16", STEPS, global_batch_size=32, adam=True)
TIE_SHARE: Final = 2**-18
"""Bytes of tie bits for each weight, at most."""


FUSED: Final = ("rms-norm", "swiglu", "flash-attention", "rotary-embedding")
RECOMPUTED: Final = ("norm-recompute", "activation-recompute")


def rows() -> list[Row]:
    """The rows of bytes, of hidden transfers, of choices and of foretold peaks, then of the optimizer and its steps."""
    with WorkerPool(search_path=[str(Path(__file__).parents[1])]) as pool:
        made = [
            Row("bf16 layer, fused operators: bytes for each s x b x h", 33, _layer_bytes(pool, FUSED), "B", COMMAND),
            Row(f"the same with {' and '.join(RECOMPUTED)}", 23.5, _layer_bytes(pool, (*FUSED, *RECOMPUTED)), "B", COMMAND),
            *(_formula_row(pool, name) for name in (*RECOMPUTED, "swap-attention", "adaptive-recompute")),
            _hidden_row(),
            *(_choice_row(groups, limit) for groups, limit in ((EXACT, 1.0), (4 * EXACT, 1.01))),
            *_planner_rows(pool),
        ]
        for names in (("reuse-fp32-param",), ("swap-optimizer",), ("reuse-fp32-param", "swap-optimizer")):
            made += _rows_of(pool, names)
    return made


def _formula_row(pool: WorkerPool, name: str) -> Row:
    """How far the bytes that a micro-batch keeps less are from the formula of a feature."""
    case = build_case([name], [Layer("benchmark")], (), 1)
    plans = (case.baseline, case.plan)
    dropout = case.recipe.shape.dropout > 0
    foretold = [stages_of(plan, registry.catalog(), dropout)[0].activations for plan in plans]
    counted = [pool.measure(plan, case.recipe, 1)[0][0] for plan in plans]
    saved, formula = counted[0] - counted[1], foretold[0] - foretold[1]
    note = f"{saved:,} bytes less for a micro-batch of the tiny model, {formula:,} by the formula"
    return Row(f"{name}: error of its bytes", 1, 100 * abs(saved / formula - 1), "%", COMMAND, note)


def _hidden_row() -> Row:
    """The share of the time of transfers that layers hide, where each takes 20 ms more."""
    from benchmarks._swapped_layers import hidden_share, overlapped, slow_copies

    with TemporaryDirectory() as folder:
        with slow_copies(f"{folder}/log.{{rank}}"):
            overlapped()
        share = hidden_share(Path(folder) / "log.0")
    return Row("swap: hidden share of transfers of 20 ms", 0.9, share, "", COMMAND, least=True)


def _choice_row(count: int, limit: float) -> Row:
    """The time of choices of what to keep over that of the optimum, by a table over every number of bytes."""
    worst = 1.0
    for seed in range(20):
        numbers = random.Random(seed)
        sizes = [(numbers.randrange(1, 100), numbers.random()) for _ in range(count)]
        budget = sum(size for size, _ in sizes) // 3
        chosen = choose([[Option("keep", size, 0.0), Option("recompute", 0, time)] for size, time in sizes], budget)
        assert chosen is not None
        spent = sum(time for (_, time), index in zip(sizes, chosen, strict=True) if index)
        table = [0.0] * (budget + 1)
        for size, time_ in sizes:
            for room in reversed(range(size, budget + 1)):
                table[room] = max(table[room], table[room - size] + time_)
        worst = max(worst, spent / (sum(time_ for _, time_ in sizes) - max(table)))
    return Row(f"adaptive-recompute: time of the choice of {count} parts / optimum", limit + 1e-12, worst, "x", COMMAND)


def _planner_rows(pool: WorkerPool) -> Iterator[Row]:
    """The error of the planner over its jobs, and its CPU time for many ranks."""
    found = [
        (100 * abs(foretold / measured - 1), job) for job in JOBS for foretold, measured in [foretold_and_measured(pool, job)]
    ]
    worst, (names, *_) = max(found, key=lambda pair: pair[0])
    yield Row(f"planner: largest error of the peak of {len(JOBS)} jobs", 5, worst, "%", COMMAND, f"with {' + '.join(names)}")
    world = {**RECIPE.world(), "num_layers": 32, "global_batch_size": 1024, "world_size": 1024, "tp": 4, "pp": 16}
    layer = Layer("benchmark", ("norm-recompute",), world=world, platform="cpu")
    start = time.process_time()
    plan = registry.resolve([layer])
    stages_of(plan, registry.catalog())
    yield Row("planner: CPU time of 1,024 ranks", 1, time.process_time() - start, "s", COMMAND)


def _layer_bytes(pool: WorkerPool, names: tuple[str, ...]) -> float:
    """Bytes that one layer keeps of a micro-batch, for each element of its hidden states."""
    kept = []
    for layers in (2, 4):
        shape = replace(SHAPE, num_layers=layers)
        recipe = replace(RECIPE, shape=shape)
        case = build_case(names, [Layer("benchmark", world=recipe.world())], (), 1)
        kept.append(pool.measure(case.plan, replace(recipe, adam=False), 1)[0][0])
    return (kept[1] - kept[0]) / 2 / (shape.seq_length * RECIPE.micro_batch_size * shape.hidden_size)


def _rows_of(pool: WorkerPool, names: tuple[str, ...]) -> list[Row]:
    layer = Layer("benchmark", settings={name: {"parts": PARTS} for name in names}, world=RECIPE.world())
    case = build_case(names, [layer], (), 1)
    turns = [(_measured(pool, case.baseline), _measured(pool, case.plan)) for _ in range(TURNS)]
    seconds = min(min(stock["seconds"][WARM:]) for stock, _ in turns)
    ratios = [min(feature["seconds"][WARM:]) / min(stock["seconds"][WARM:]) for stock, feature in turns]
    found, what = turns[0][1], " + ".join(names)
    weights, window = found["weights"], 4 * (found["weights"] / PARTS + found["largest"])
    windows = 3 if "swap-optimizer" in names else 1
    ties = TIE_SHARE * weights + found["tensors"]  # bits fill whole bytes for each tensor
    kept = ties + (0 if "swap-optimizer" in names else 2 * weights)
    tokens = RECIPE.global_batch_size * SHAPE.seq_length
    spread = f"{TURNS} pairs, {min(ratios):.3f} to {max(ratios):.3f}"
    note = f"{spread}; {seconds:.2f} s without it, {tokens:,} tokens, {weights:,} weights"
    return [
        Row(
            f"{what}: device bytes for main weights and states at rest",
            _target(names, kept, weights),
            found["rest"],
            "B",
            COMMAND,
        ),
        Row(f"{what}: main weights in a step", windows * window, found["window"], "B", COMMAND),
        Row(f"{what}: training step / without it", 1.05, statistics.median(ratios), "x", COMMAND, note),
    ]


def _target(names: tuple[str, ...], kept: float, weights: int) -> float:
    """Bytes of the formula: states stay on the device where they are not swapped."""
    return kept + (0 if "swap-optimizer" in names else 8 * weights)


def _measured(pool: WorkerPool, plan: Any) -> dict[str, Any]:
    (found,) = pool.call(train, 1, RECIPE, plan=plan)
    return dict(found)


def train(recipe: Recipe) -> dict[str, Any]:
    """Train in this process; return the seconds of each step and the bytes of the optimizer."""
    import torch
    from megatron.core import tensor_parallel

    from mindspeed.memory.optimizer_windows import main_weights, members, resting_bytes
    from mindspeed.workbench.verification import training
    from mindspeed.workbench.verification.record import RankResult

    torch.manual_seed(recipe.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(recipe.seed, force_reset_rng=True)
    run = training._Run(recipe, RankResult())
    weights = [weight for member in members(run.optimizer) for weight in main_weights(member)]
    seconds: list[float] = []
    with _watched(members(run.optimizer)) as peak:
        for step in range(recipe.steps):
            start = time.process_time()
            run.forward_backward(step)
            run.optimizer.step()
            seconds.append(time.process_time() - start)
    sizes = [weight.main.numel() for weight in weights]
    return {
        "seconds": seconds,
        "rest": resting_bytes(run.optimizer).device,
        "window": peak[0],
        "weights": sum(sizes),
        "largest": max(sizes),
        "tensors": len(sizes),
    }


@contextmanager
def _watched(optimizers: list[Any]) -> Iterator[list[int]]:
    """Yield the most bytes that main weights have in a window."""
    from mindspeed.memory.optimizer_windows import managed_by

    peak = [0]
    for managed in filter(None, map(managed_by, optimizers)):

        @contextmanager
        def look(window: Any, managed: Any = managed) -> Iterator[None]:
            peak[0] = max(peak[0], sum(weight.main.untyped_storage().nbytes() for weight in managed.weights))
            yield

        managed.contexts.append(look)
    yield peak


if __name__ == "__main__":
    main(rows)
