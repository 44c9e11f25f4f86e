"""What do the transfers, activations and products of a layer with experts cost? Two ranks of gloo, Megatron's own layer beside.

``python -m benchmarks.moe``. Bytes and host reads are counted. Exposed transfers are measured on a clock that products and
transfers alone advance: each product takes at least as long as a transfer, so other load on the machine is not in the numbers.
Times are wall clock, the best of several passes. ``TABLE`` has one function per row or group of rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import _chunked_layer as chunked
from benchmarks import _moe_layer as layer
from benchmarks._moe_layer import Outcome, Shape, plan_of
from benchmarks.table import Row, main
from mindspeed.moe import costs
from mindspeed.verification.pool import WorkerPool

COMMAND: Final = "python -m benchmarks.moe"
LEVEL1: Final = {"moe-zero-memory": {"level": "level1"}}
PARTS: Final = {"moe-alltoall-overlap": {"parts": 4}}
RECOMPUTED: Final = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
WIDE: Final = Shape(tokens=512, hidden=256, width=512)
Table = Callable[[WorkerPool], list[Row]]


def run(shape: Shape) -> Outcome:
    return layer.run(shape)


def reads(shape: Shape) -> int:
    """Reads of the device on the host in a forward and backward pass."""
    from mindspeed.platforms.host_reads import host_reads

    moe = layer.build(shape, torch.float32)
    x = torch.randn(shape.tokens, 1, shape.hidden, device="cuda").requires_grad_()
    with host_reads() as seen:
        moe(x)[0].sum().backward()
    return len(seen)


def seconds(shape: Shape, passes: int = 15) -> float:
    """The shortest forward and backward pass of a layer."""
    moe = layer.build(shape, torch.float32)
    x = torch.randn(shape.tokens, 1, shape.hidden).requires_grad_()
    return best(lambda: moe(x)[0].sum().backward(), passes)


def best(work: Callable[[], Any], passes: int) -> float:
    took = []
    for _ in range(passes):
        start = time.perf_counter()
        work()
        took.append(time.perf_counter() - start)
    return min(took[1:])


def exposed_transfers(pool: WorkerPool) -> list[Row]:
    """The share of transfer time that a rank waits, which is all of it without overlap."""
    cases: list[tuple[str, tuple[str, ...], Any, int, float]] = [
        ("Megatron's dispatcher", (), {}, 96, 1.0),
        ("moe-alltoall-overlap, shared experts", ("moe-alltoall-overlap",), {}, 96, 0.15),
        ("moe-alltoall-overlap, none", ("moe-alltoall-overlap",), {}, 0, 0.80),
        ("moe-alltoall-overlap, none, four parts", ("moe-alltoall-overlap",), PARTS, 0, 0.40),
        ("moe-allgather-overlap, shared experts", ("moe-allgather-overlap",), {}, 96, 0.35),
    ]
    rows = []
    for name, features, settings, shared, most in cases:
        plan = plan_of(*features, settings=settings, level=2 if features else 0)
        share = max(rank.exposed for rank in pool.call(run, 2, Shape(shared=shared), plan=plan))
        rows.append(Row(f"{name}: transfers that are not hidden", most, share, "", COMMAND))
    return rows


def chunks(how: chunked.Run) -> chunked.Measured:
    return chunked.measure(how)


def transfers_of_chunks(pool: WorkerPool) -> list[Row]:
    """Transfer time that a rank waits with a layer in chunks, and what is kept, beside the same layer in one piece."""
    whole, *piped = (pool.call(chunks, 2, chunked.Run(), plan=chunked.plan(parts, "flash-attention"))[0] for parts in (0, 2, 4))
    rows = []
    for parts, most, ours in zip((2, 4), (0.45, 0.30), piped, strict=True):
        what = f"ampipe, {parts} chunks"
        rows.append(Row(f"{what}: transfer time not hidden / one piece's", most, ours.exposed / whole.exposed, "", COMMAND))
        kept = (ours.kept - chunked.MASK) / (whole.kept - chunked.MASK)
        rows.append(Row(f"{what}: activations kept / one piece's", 1.05, kept, "x", COMMAND))
    return rows


def sent_bytes(pool: WorkerPool) -> list[Row]:
    """Bytes at the process groups, beside the formula and beside Megatron."""
    shape = Shape()
    call = costs.Call(shape.tokens, shape.topk, shape.hidden, 4, 4, shape.experts, ranks=2)
    ours = pool.call(run, 2, shape, plan=plan_of("moe-alltoall-overlap"))[0]
    megatrons = pool.call(run, 2, shape, plan=plan_of(level=0))[0]
    gathered = pool.call(run, 2, shape, plan=plan_of("moe-allgather-overlap"))[0]
    formula = costs.alltoall(call, received=ours.rows)
    chosen = 1024 * 4 * (4 + 4)  # tokens x experts of each x bytes of an index and a probability
    return [
        Row("moe-alltoall-overlap: all-to-all bytes / formula", 1, ours.sent["all_to_all"] / formula, "x", COMMAND),
        Row(
            "moe-alltoall-overlap: all-to-all bytes / Megatron's",
            1,
            ours.sent["all_to_all"] / megatrons.sent["all_to_all"],
            "x",
            COMMAND,
        ),
        Row(
            "moe-allgather-overlap: all-gather bytes / formula",
            1,
            gathered.sent["all_gather"] / costs.allgather(call)[0],
            "x",
            COMMAND,
        ),
        Row("map and probabilities of 4 of 64 experts / of all", 0.1, chosen / (1024 * 64 * (1 + 4)), "x", COMMAND),
    ]


def host_reads(pool: WorkerPool) -> list[Row]:
    """Reads of the device on the host per layer and micro-batch, forward and backward."""
    cases: list[tuple[str, tuple[str, ...], int]] = [
        ("Megatron's all-to-all", (), 10),
        ("moe-alltoall-overlap", ("moe-alltoall-overlap",), 1),
        ("moe-allgather-overlap", ("moe-allgather-overlap",), 1),
    ]
    return [
        Row(
            f"{name}: reads of the device on the host per layer",
            most,
            max(pool.call(reads, 2, Shape(), plan=plan_of(*features, level=2 if features else 0))),
            "",
            COMMAND,
        )
        for name, features, most in cases
    ]


def kept_bytes(pool: WorkerPool) -> list[Row]:
    """Activations that a layer keeps less, beside the formula."""
    shape = Shape()
    plain = pool.call(run, 2, shape, plan=plan_of("moe-alltoall-overlap"))[0]
    everything = costs.kept(plain.rows, shape.hidden, shape.width, 4, activation=2)
    ends = 8 * shape.experts // 2
    less = {"level0": everything - costs.kept_by_level0(plain.rows, shape.width, 4) + ends, "level1": everything + ends}
    rows = []
    for level, formula in less.items():
        plan = plan_of("moe-zero-memory", settings={"moe-zero-memory": {"level": level}})
        kept = pool.call(run, 2, shape, plan=plan)[0].kept
        rows.append(Row(f"moe-zero-memory, {level}: bytes kept less / formula", 1, (plain.kept - kept) / formula, "x", COMMAND))
    return rows


def layer_time(pool: WorkerPool) -> list[Row]:
    """Forward and backward of a layer that keeps less, beside Megatron's recomputation of the whole MoE module."""
    recomputed = Shape(WIDE.tokens, WIDE.hidden, WIDE.width, options=RECOMPUTED)
    megatrons = max(pool.call(seconds, 2, recomputed, plan=plan_of("moe-grouped-gemm")))
    rows = []
    for level, most in (("level0", 0.85), ("level1", 0.95)):
        plan = plan_of("moe-zero-memory", settings={"moe-zero-memory": {"level": level}})
        share = max(pool.call(seconds, 2, WIDE, plan=plan)) / megatrons
        rows.append(Row(f"moe-zero-memory, {level}: layer time / Megatron's recompute of it", most, share, "x", COMMAND))
    return rows


def grouped_products(pool: WorkerPool) -> list[Row]:
    """Experts of one rank as a grouped product, beside a product per expert: forward and backward in bf16."""
    return [
        Row(
            "32 experts of 256 x 128, 2,048 rows, bf16: time grouped / single", 0.65, grouped_share(32, 256, 128), "x", COMMAND
        ),
        Row("4 experts of 256 x 512, 2,048 rows, bf16: time grouped / single", 1.0, grouped_share(4, 256, 512), "x", COMMAND),
    ]


def grouped_share(experts: int, hidden: int, width: int, rows: int = 2048) -> float:
    """The time of grouped experts as a share of that of single ones with Megatron's weights [out, in], both gated."""
    from mindspeed.moe.products import deferred, grouped_product

    draw = torch.Generator().manual_seed(0)
    cuts = torch.randint(rows + 1, (experts - 1,), generator=draw).sort().values
    ends = torch.cat([cuts, torch.tensor([rows])])
    x = torch.randn(rows, hidden, generator=draw).bfloat16().requires_grad_()
    first = torch.randn(experts, hidden, 2 * width, generator=draw).bfloat16().requires_grad_()
    second = torch.randn(experts, width, hidden, generator=draw).bfloat16().requires_grad_()
    counts = ends.diff(prepend=ends.new_zeros(1)).tolist()

    def activated(h: Tensor) -> Tensor:
        gate, up = h.chunk(2, -1)
        return F.silu(gate) * up

    def grouped() -> None:
        h = grouped_product(x, deferred(first, experts, hidden), ends)
        grouped_product(activated(h), deferred(second, experts, width), ends).sum().backward()

    weights = [[w.detach().t().contiguous().requires_grad_() for w in stack] for stack in (first, second)]

    def single() -> None:
        parts = zip(x.split(counts), *weights, strict=True)
        torch.cat([F.linear(activated(F.linear(part, one)), two) for part, one, two in parts]).sum().backward()

    return best(grouped, 12) / best(single, 12)


TABLE: Final[tuple[Table, ...]] = (
    exposed_transfers,
    transfers_of_chunks,
    sent_bytes,
    host_reads,
    kept_bytes,
    layer_time,
    grouped_products,
)


def rows() -> list[Row]:
    torch.set_num_threads(1)
    with WorkerPool(search_path=[str(Path(__file__).resolve().parents[1])]) as pool:
        return [row for table in TABLE for row in table(pool)]


if __name__ == "__main__":
    main(rows)
