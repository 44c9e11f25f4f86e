"""Are the modules of `mindspeed.nn` and `mindspeed.parallel` as fast as their equivalents in torch?

``python -m benchmarks.own_trainer``. Modules: forward and backward, in turns, medians of ratios, two torch threads. Pipelines:
two ranks of gloo with one thread each, the same stages and micro-batches, steps in turns with those of
``torch.distributed.pipelining``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble

from benchmarks.operators.timing import race
from benchmarks.table import Row, main
from mindspeed.nn import Attention, LinearCrossEntropyLoss, MoE, RMSNorm, RotaryEmbedding, SwiGLU
from mindspeed.parallel import Pipeline
from mindspeed.workbench.verification.pool import WorkerPool

COMMAND: Final = "python -m benchmarks.own_trainer"
RANKS, MICRO_BATCHES, ROUNDS = 2, 8, 15
WIDTH, ROWS = 512, 256
EXPERTS, TOP_K = 8, 2


def module_rows() -> list[Row]:
    """A row for each module that torch has an equivalent of, in fp32."""
    torch.manual_seed(0)
    x = torch.randn(2, 1024, 1024, requires_grad=True)
    halves = torch.randn(2, 1024, 2048, requires_grad=True)
    q, k, v = (torch.randn(2, 1024, heads, 64, requires_grad=True) for heads in (16, 4, 4))
    norm, peer = RMSNorm(1024), nn.RMSNorm(1024)
    rotary, moe = RotaryEmbedding(64, 1024), MoE(1024, 1024, EXPERTS, TOP_K)
    loss, torchs_loss = LinearCrossEntropyLoss(512, 8192, chunks=4, mode="accumulate"), nn.LinearCrossEntropyLoss(512, 8192)
    hidden, target = torch.randn(2, 1024, 512, requires_grad=True), torch.randint(8192, (2, 1024))
    tokens = torch.randn(512, 1024, requires_grad=True)

    def gated(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return F.silu(a) * b

    def rotated(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        cos, sin = rotary.cos[:1024, None], rotary.sin[:1024, None]
        return x * cos + torch.cat((-b, a), -1) * sin

    def torchs_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        made: Tensor = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return made.transpose(1, 2)

    def expert_by_expert(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        probs, chosen = moe.router(x)
        outputs = torch.zeros_like(x)
        for expert in range(EXPERTS):
            (rows,) = chosen[:, expert].nonzero(as_tuple=True)
            made = gated(x[rows] @ up[expert]) @ down[expert]
            outputs = outputs.index_add(0, rows, made * probs[rows, expert, None])
        return outputs

    pairs: list[tuple[str, Callable[..., Any], Callable[..., Any], tuple[Tensor, ...]]] = [
        ("RMSNorm / nn.RMSNorm", norm, peer, (x,)),
        ("SwiGLU / silu and product", SwiGLU(), gated, (halves,)),
        ("RotaryEmbedding / products", rotary, rotated, (q,)),
        ("Attention / scaled_dot_product_attention", Attention(), torchs_attention, (q, k, v)),
        (
            "LinearCrossEntropyLoss, 4 chunks / nn.LinearCrossEntropyLoss",
            lambda hidden, *weights: loss(hidden, target),
            lambda hidden, *weights: torchs_loss(hidden.flatten(0, 1), target.flatten()),
            (hidden, loss.linear.weight, torchs_loss.linear.weight),
        ),
        ("MoE / expert by expert", lambda x, up, down: moe(x), expert_by_expert, (tokens, moe.up, moe.down)),
    ]
    made = []
    for what, ours, torchs, inputs in pairs:
        result = race(_both(ours, inputs), {"torch": _both(torchs, inputs)})
        ratio = 1 / result.ratios["torch"]
        note = (
            f"ours {result.seconds['ours'] * 1e3:.1f} ms; forward and backward, fp32{result.remark() and '; '}{result.remark()}"
        )
        made.append(Row(f"{what}, time", 1.0, ratio, "x", COMMAND, note))
    return made


def _both(run: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Callable[[], object]:
    given = torch.randn_like(run(*inputs))
    return lambda: torch.autograd.grad(run(*inputs), inputs, given, allow_unused=True)


def _stages(rank: int, v: bool) -> tuple[list[nn.Module], list[int]]:
    torch.manual_seed(1)
    whole = [
        nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH))
        for _ in range(2 * RANKS)
    ]
    numbers = [rank, 2 * RANKS - 1 - rank] if v else [rank, rank + RANKS]
    return [whole[number] for number in numbers], numbers


def _squared(output: Tensor, target: Any) -> Tensor:
    return (output - target).square().mean()


def step_times(schedule: str) -> dict[str, list[float]]:
    """Return the seconds of steps on this rank, by ours and by torch's schedule in turns."""
    torch.set_num_threads(1)
    rank = dist.get_rank()
    mine, _ = _stages(rank, schedule == "zb-v")
    group: Any = dist.group.WORLD
    ours = Pipeline(mine, group, MICRO_BATCHES, schedule=schedule, shape=(ROWS, WIDTH))
    modules, numbers = _stages(rank, schedule == "zb-v")
    stages = [
        PipelineStage(module, number, 2 * RANKS, torch.device("cpu")) for module, number in zip(modules, numbers, strict=True)
    ]
    kinds: dict[str, Any] = {"interleaved": ScheduleInterleaved1F1B, "zb-v": ScheduleZBVZeroBubble}
    torchs = kinds[schedule](stages, MICRO_BATCHES, loss_fn=_squared, scale_grads=False)
    inputs = [torch.randn(ROWS, WIDTH) for _ in range(MICRO_BATCHES)]
    joined, targets = torch.cat(inputs), torch.zeros(MICRO_BATCHES * ROWS, WIDTH)
    last = any(stage.is_last for stage in stages)
    runs: dict[str, Callable[[], object]] = {
        "ours": lambda: ours.step(inputs, lambda output, number: _squared(output, 0.0)),
        "torch": lambda: torchs.step(*([joined] if rank == 0 else []), **({"target": targets} if last else {})),
    }
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(ROUNDS + 2):
        for name, run in runs.items():
            dist.barrier()
            begin = time.perf_counter()
            run()
            dist.barrier()
            if turn >= 2:
                spent[name].append(time.perf_counter() - begin)
    ours.close()
    return spent


def pipeline_rows() -> list[Row]:
    """A row for each schedule that torch has as well."""
    made = []
    with WorkerPool(search_path=[str(Path(__file__).parents[1])]) as pool:
        for schedule in ("interleaved", "zb-v"):
            times = pool.call(step_times, RANKS, schedule)[0]
            ratio = statistics.median(own / peer for own, peer in zip(times["ours"], times["torch"], strict=True))
            milliseconds = statistics.median(times["ours"]) * 1e3
            note = f"ours {milliseconds:.0f} ms; {RANKS} ranks of two stages, {MICRO_BATCHES} micro-batches, fp32"
            made.append(Row(f"Pipeline {schedule} / torch.distributed.pipelining, step time", 1.0, ratio, "x", COMMAND, note))
    return made


def rows() -> list[Row]:
    torch.set_num_threads(2)
    return [*module_rows(), *pipeline_rows()]


if __name__ == "__main__":
    main(rows)
