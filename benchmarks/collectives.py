"""What does a collective of the cpu platform send and cost beside gloo's own? Bytes as the kernel counts them on sockets."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from inspect import unwrap
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

import mindspeed
from benchmarks._sockets import bytes_on_sockets
from benchmarks.table import Row, main
from mindspeed.workbench.verification.pool import WorkerPool

COMMAND: Final = "python -m benchmarks.collectives"
RANKS: Final = (2, 4)
SIZES: Final = {"64 KiB": 1 << 14, "4 MiB": 1 << 20}
"""Elements, of fp32, of one rank's part."""
REPEAT: Final = 15


def measured(count: int) -> dict[str, tuple[float, float]]:
    """Bytes that this rank sends and median seconds of each collective, candidates interleaved; parts of ``count`` numbers."""
    world = dist.get_world_size()
    whole, part = torch.randn(world * count), torch.empty(count)
    candidates: dict[str, Callable[[], object]] = {
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "reduce-scatter of gloo": lambda: unwrap(dist.reduce_scatter_tensor)(part, whole),
        "all-gather": lambda: dist.all_gather_into_tensor(whole, part),
    }
    sent = {name: _sent(call) for name, call in candidates.items()}
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(REPEAT):
        for name, call in candidates.items():
            dist.barrier()
            begin = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - begin)
    return {name: (sent[name], statistics.median(times[name])) for name in candidates}


def _sent(call: Callable[[], object]) -> int:
    call()
    dist.barrier()
    before = bytes_on_sockets()
    call()
    dist.barrier()
    return bytes_on_sockets() - before


def rows() -> list[Row]:
    plan = mindspeed.plan(features=[], platform="cpu")
    made: list[Row] = []
    with WorkerPool(search_path=[str(Path(__file__).resolve().parents[1])]) as pool:
        for ranks in RANKS:
            for size, count in SIZES.items():
                made += rows_of(f"{size} a rank, {ranks} ranks", ranks, count, pool.call(measured, ranks, count, plan=plan))
    return made


def rows_of(where: str, ranks: int, count: int, found: list[dict[str, tuple[float, float]]]) -> list[Row]:
    """Bytes of the rank that sends most over those that it must send; seconds of the slowest rank over gloo's."""
    least = (ranks - 1) * count * 4
    sent, seconds = ({name: max(rank[name][n] for rank in found) for name in found[0]} for n in range(2))
    ours, gloo = seconds["reduce-scatter"], seconds["reduce-scatter of gloo"]
    by_gloo = sent["reduce-scatter of gloo"] / least
    note = f"{ours * 1e3:.2f} ms; gloo's {gloo * 1e3:.2f} ms with {by_gloo:.2f} times the bytes needed"
    return [
        Row(f"reduce-scatter, {where}: bytes sent / bytes needed", 1.02, sent["reduce-scatter"] / least, "x", COMMAND),
        Row(f"reduce-scatter, {where}: time / gloo's", 0.6, ours / gloo, "x", COMMAND, note),
        Row(f"all-gather, which is gloo's, {where}: bytes sent / bytes needed", 1.02, sent["all-gather"] / least, "x", COMMAND),
    ]


if __name__ == "__main__":
    main(rows)
