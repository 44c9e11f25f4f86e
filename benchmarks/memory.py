"""What memory features save and cost: bytes of a layer, of the optimizer at rest and in its windows, and the time of a step.

``python -m benchmarks.memory``. One process of the CPU platform trains a Llama-style model in bf16 with plain Adam. The runs
without and with a feature alternate, and the ratio is that of the CPU time of their fastest steps behind the first two.
The bytes of a layer are half of what a micro-batch keeps more in four layers than in two, divided by s x b x h.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from benchmarks.table import Row, main
from mindspeed.resolution.request import Layer
from mindspeed.verification.case import build_case
from mindspeed.verification.pool import WorkerPool
from mindspeed.verification.shape import ModelShape, Recipe

COMMAND: Final = "python -m benchmarks.memory"
PARTS: Final = 16
TURNS: Final = 6
STEPS: Final = 10
WARM: Final = 2
SHAPE: Final = ModelShape(
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
RECIPE: Final = Recipe(SHAPE, "bf16", STEPS, global_batch_size=8, adam=True)
TIE_SHARE: Final = 2**-18
"""Bytes of tie bits for each weight, at most."""


FUSED: Final = ("rms-norm", "swiglu", "flash-attention", "rotary-embedding")
RECOMPUTED: Final = ("norm-recompute", "activation-recompute")


def rows() -> list[Row]:
    """The rows of a layer's bytes, and of the features that take main weights and states away."""
    with WorkerPool() as pool:
        made = [
            Row("bf16 layer, fused operators: bytes for each s x b x h", 33, _layer_bytes(pool, FUSED), "B", COMMAND),
            Row(f"the same with {' and '.join(RECOMPUTED)}", 23.5, _layer_bytes(pool, (*FUSED, *RECOMPUTED)), "B", COMMAND),
        ]
        for names in (("reuse-fp32-param",), ("swap-optimizer",), ("reuse-fp32-param", "swap-optimizer")):
            made += _rows_of(pool, names)
    return made


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
    seconds = [min(min(run["seconds"][WARM:]) for run in runs) for runs in zip(*turns, strict=True)]
    ratios = [min(feature["seconds"][WARM:]) / min(stock["seconds"][WARM:]) for stock, feature in turns]
    found, what = turns[0][1], " + ".join(names)
    weights, window = found["weights"], 4 * (found["weights"] / PARTS + found["largest"])
    windows = 3 if "swap-optimizer" in names else 1
    ties = TIE_SHARE * weights + found["tensors"]  # bits fill whole bytes for each tensor
    kept = ties + (0 if "swap-optimizer" in names else 2 * weights)
    note = f"{TURNS} pairs, median {statistics.median(ratios):.3f}, step without it {seconds[0]:.2f} s, {weights:,} weights"
    return [
        Row(
            f"{what}: device bytes for main weights and states at rest",
            _target(names, kept, weights),
            found["rest"],
            "B",
            COMMAND,
        ),
        Row(f"{what}: main weights in a step", windows * window, found["window"], "B", COMMAND),
        Row(f"{what}: training step / without it", 1.05, seconds[1] / seconds[0], "x", COMMAND, note),
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
    from mindspeed.verification import training
    from mindspeed.verification.record import RankResult

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
