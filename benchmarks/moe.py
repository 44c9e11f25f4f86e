"""What do the transfers, activations and products of a layer with experts cost? Two ranks of gloo, Megatron's own layer beside.

``python -m benchmarks.moe [NAME ...] [OUTPUT.json]``: the functions of ``TABLE`` that are named, or all. Bytes and host reads
are counted. Exposed transfers are measured on a clock that products and transfers alone advance: each product takes at least as
long as a transfer, so other load on the machine is not in the numbers. Times are wall clock, the best of several passes. A
control is what stands without the feature, or with a wait right after each post.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks import _capacity_table as places
from benchmarks import _chunked_layer as chunked
from benchmarks import _moe_layer as layer
from benchmarks import _units_layer as units
from benchmarks._moe_layer import Outcome, Shape, plan_of
from benchmarks.table import Row, main
from mindspeed.features.expert_parallel import choice
from mindspeed.workbench.verification.pool import WorkerPool
from tests.moe import closed_forms

COMMAND: Final = "python -m benchmarks.moe"
LEVEL1: Final = {"moe-zero-memory": {"level": "level1"}}
PARTS: Final = {"moe-alltoall-overlap": {"parts": 4}}
RECOMPUTED: Final = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
WIDE: Final = Shape(tokens=512, hidden=256, width=512)
FEW_EXPERTS: Final = Shape(tokens=1024, hidden=512, width=512, experts=4)
Table = Callable[[WorkerPool], list[Row]]


def run(shape: Shape) -> Outcome:
    return layer.run(shape)


def run_eagerly(shape: Shape) -> Outcome:
    """The outcome where every transfer is waited for right after its post."""
    return layer.run_eagerly(shape)


def run_late(shape: Shape) -> Outcome:
    """The outcome where every transfer takes the time of one product."""
    return layer.run(shape, delay=1.0)


def run_counting_pairs(shape: Shape) -> tuple[Outcome, int, int]:
    return layer.run_counting_pairs(shape)


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


def delayed_seconds(shape: Shape, delay: float, passes: int = 10) -> float:
    """The same with transfers that arrive ``delay`` seconds after their post at the earliest."""
    names = ("all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor")
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(patch.object(dist, name, _late(getattr(dist, name), delay)))
        return seconds(shape, passes)


def _late(original: Callable[..., Any], delay: float) -> Callable[..., Any]:
    def collective(*args: Any, async_op: bool = False, **more: Any) -> Any:
        work = _Late(original(*args, async_op=True, **more), time.perf_counter() + delay)
        return work if async_op else work.wait() and None

    return collective


class _Late:
    """The handle of a transfer that ends at a time of the clock or later."""

    def __init__(self, work: Any, end: float) -> None:
        self._work, self._end = work, end

    def wait(self, *args: Any) -> Any:
        done = self._work.wait(*args)
        if (left := self._end - time.perf_counter()) > 0:
            time.sleep(left)
        return done


def product_seconds(shape: Shape) -> float:
    """The time of the second product of balanced experts of one rank."""
    x, weight = torch.randn(shape.tokens * shape.topk, shape.width), torch.randn(shape.width, shape.hidden)
    return best(lambda: x @ weight, 20)


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
    eager = max(rank.exposed for rank in pool.call(run_eagerly, 2, Shape(shared=96), plan=plan_of("moe-alltoall-overlap")))
    name = "moe-alltoall-overlap, shared experts, a wait right after each post (control)"
    return [*rows, Row(f"{name}: transfers that are not hidden", 0.80, eager, "", COMMAND, least=True)]


def run_paired(shape: Shape, together: bool) -> tuple[float, float]:
    return layer.run_paired(shape, together)


def paired_passes(pool: WorkerPool) -> list[Row]:
    """The share of transfer time that a rank waits in a pair of passes, beside the same two passes one after the other."""
    rows = []
    for name, features in (("", ()), (", moe-alltoall-overlap", ("moe-alltoall-overlap",))):
        plan = plan_of("moe-fb-overlap", *features, global_batch_size=8, micro_batch_size=1)
        apart, pair = (pool.call(run_paired, 2, Shape(shared=96), together, plan=plan) for together in (False, True))
        note = f"{max(time for _, time in pair) / max(time for _, time in apart):.2f} of the time of one after the other"
        shares = [max(share for share, _ in ranks) for ranks in (pair, apart)]
        what = f"moe-fb-overlap{name}, a pair of passes of four layers: transfers that are not hidden"
        rows.append(Row(what, 0.05, shares[0], "", COMMAND, f"{shares[1]:.2f} one after the other; {note}"))
    return rows


def processor_times(shape: Shape, keeps_freed: bool) -> tuple[float, float]:
    return layer.processor_times(shape, keeps_freed)


def processor_time_of_pairs(pool: WorkerPool) -> list[Row]:
    """The processor time of a pair of passes over that of the same two passes one after the other."""
    rows = []
    plan = plan_of("moe-fb-overlap", global_batch_size=8, micro_batch_size=1)
    for shape in (Shape(256, 128, 256), Shape(1024, 256, 512), Shape(1024, 512, 1024)):
        for keeps_freed in (False, True):
            ranks = pool.call(processor_times, 2, shape, keeps_freed, plan=plan)
            apart, pair = (sum(times) for times in zip(*ranks, strict=True))
            what = f"a pair of passes of {shape.tokens} tokens x {shape.hidden}{', freed memory is kept' * keeps_freed}"
            note = f"{apart / 2:.2f} s one after the other"
            rows.append(Row(f"{what}: processor time / one after the other", 1.02, pair / apart, "x", COMMAND, note))
    return rows


def chunks(how: chunked.Run) -> chunked.Measured:
    return chunked.measure(how)


def seconds_of_chunks(tokens: int, hidden: int, clock: str) -> tuple[float, float]:
    return chunked.seconds(tokens, hidden, clock)


CLOCKS: Final = {"pass": "perf_counter", "CPU time of a pass": "process_time"}


def on_loopback(what: str, measured: Callable[[str], list[Any]]) -> list[Row]:
    """The time of a layer where nothing is delayed, beside that of the same one unpiped: ``measured`` has both for a clock."""
    rows = []
    for name, clock in CLOCKS.items():
        unpiped, piped = map(max, zip(*measured(clock), strict=True))
        rows.append(Row(f"{what}, loopback: {name} / unpiped", 1.1, piped / unpiped, "x", COMMAND))
    return rows


def transfers_of_chunks(pool: WorkerPool) -> list[Row]:
    """Transfer time that a rank waits with a layer in chunks, and what is kept, beside the same layer in one piece."""
    whole, *piped = (pool.call(chunks, 2, chunked.Run(), plan=chunked.plan(parts, "flash-attention"))[0] for parts in (0, 2, 4))
    rows = []
    for parts, most, ours in zip((2, 4), (0.45, 0.30), piped, strict=True):
        what = f"ampipe, {parts} chunks"
        rows.append(Row(f"{what}: transfer time not hidden / one piece's", most, ours.exposed / whole.exposed, "", COMMAND))
        kept = (ours.kept - chunked.MASK) / (whole.kept - chunked.MASK)
        rows.append(Row(f"{what}: activations kept / one piece's", 1.05, kept, "x", COMMAND))
    plan = chunked.plan(2, "flash-attention", "deepspeed-moe-rearrange", "moe-grouped-gemm")
    return [
        *rows,
        *on_loopback("ampipe, two chunks", lambda clock: pool.call(seconds_of_chunks, 2, 512, 512, clock, plan=plan)),
    ]


def places_by_index(pool: WorkerPool) -> list[Row]:
    """Tokens to the places of capacity-gated experts and back, beside products with masks and Megatron's padding."""
    masks, megatrons = places.shares()
    less, of_masks = places.saved_less()
    what = "deepspeed-moe-rearrange, 2,048 tokens, 16 experts of 512: dispatch and combine"
    return [
        Row(f"{what}, time / masks'", 0.1, masks, "x", COMMAND),
        Row(f"{what}, time / Megatron's with padding", 1.1, megatrons, "x", COMMAND),
        Row(f"{what}, bytes kept less / bytes of the masks", 0.97, less / of_masks, "x", COMMAND, least=True),
    ]


def in_units(how: units.Run) -> units.Measured:
    return units.measure(how)


def seconds_in_units(shape: Shape, parts: tuple[int, ...], clock: str) -> list[float]:
    return units.seconds(shape, parts, clock)


def transfers_of_units(pool: WorkerPool) -> list[Row]:
    """Transfer time that a rank waits with experts in units, what is kept, and the time of a pass where nothing is delayed."""
    rows = []
    for experts, parts in ((2, 2), (2, 3), (4, 2)):
        count = experts // 2 * parts
        whole, piped = (pool.call(in_units, 2, units.Run(experts, n), plan=units.plan())[0] for n in (0, parts))
        what = f"pipe-experts, {count} units"
        rows.append(Row(f"{what}: transfer time not hidden / unpiped", 1.3 / count, piped.exposed / whole.exposed, "", COMMAND))
        rows.append(Row(f"{what}: activations kept / unpiped", 1.02, piped.kept / whole.kept, "x", COMMAND))

    def both(clock: str) -> list[Any]:
        return pool.call(seconds_in_units, 2, FEW_EXPERTS, (0, 2), clock, plan=units.plan())

    return [*rows, *on_loopback("pipe-experts, two parts", both)]


def sent_bytes(pool: WorkerPool) -> list[Row]:
    """Bytes at the process groups, beside the formula and beside Megatron."""
    shape = Shape()
    call = choice.ExpertWork(shape.tokens, shape.topk, shape.hidden, 4, 4, shape.experts, ranks=2)
    ours = pool.call(run, 2, shape, plan=plan_of("moe-alltoall-overlap"))[0]
    megatrons = pool.call(run, 2, shape, plan=plan_of(level=0))[0]
    gathered = pool.call(run, 2, shape, plan=plan_of("moe-allgather-overlap"))[0]
    formula = choice.alltoall(call, received=ours.rows)
    many, allgather = Shape(experts=64, topk=4), {"expert-parallel": {"dispatcher": "allgather"}}
    plans = plan_of("moe-allgather-overlap", num_experts=64), plan_of(settings=allgather, level=0, num_experts=64)
    tokens = 2 * 2 * many.tokens * many.hidden * 4  # of two ranks, and gradients of answers in backward
    chosen, every = (pool.call(run, 2, many, plan=plan)[0].sent["all_gather"] - tokens for plan in plans)
    shares = {
        "moe-alltoall-overlap: all-to-all bytes / formula": (1, ours.sent["all_to_all"] / formula),
        "moe-alltoall-overlap: all-to-all bytes / Megatron's": (1, ours.sent["all_to_all"] / megatrons.sent["all_to_all"]),
        "moe-allgather-overlap: all-gather bytes / formula": (1, gathered.sent["all_gather"] / choice.allgather(call)[0]),
        "4 of 64 experts: gathered bytes of map and probabilities / Megatron's": (0.1, chosen / every),
    }
    return [Row(what, most, share, "x", COMMAND) for what, (most, share) in shares.items()]


def once_per_rank(pool: WorkerPool) -> list[Row]:
    """All-to-all bytes where a token goes once to a rank, beside those of the distinct pairs of a token and a rank."""
    shape, settings = Shape(topk=4), {"moe-alltoall-dispatcher": {"once_per_rank": True}}
    plan = plan_of("moe-alltoall-overlap", settings=settings)
    outcome, sent, received = pool.call(run_counting_pairs, 2, shape, plan=plan)[0]
    every = pool.call(run, 2, shape, plan=plan_of("moe-alltoall-overlap"))[0].sent["all_to_all"]
    call = choice.ExpertWork(shape.tokens, shape.topk, shape.hidden, 4, 4, shape.experts, ranks=2)
    formula, ours = closed_forms.once_per_rank(call, sent, received), outcome.sent["all_to_all"]
    return [
        Row("once_per_rank, top 4: all-to-all bytes / those of distinct pairs", 1, ours / formula, "x", COMMAND),
        Row("once_per_rank, top 4: all-to-all bytes / those of every expert", 1, ours / every, "x", COMMAND),
    ]


def whole_experts(pool: WorkerPool) -> list[Row]:
    """Bytes of a rank where tensor-parallel ranks have whole experts, beside those where they split them: TP 2 x EP 2."""
    tensor = ("moe-alltoall-overlap", "sequence-parallel")
    split = pool.call(run, 4, Shape(), plan=plan_of(*tensor, tp=2))
    whole = pool.call(run, 4, Shape(), plan=plan_of(*tensor, "moe-tp-extend-ep", tp=2, ep=4, world_size=4))
    share = max(sum(rank.sent.values()) for rank in whole) / max(sum(rank.sent.values()) for rank in split)
    return [Row("moe-tp-extend-ep, 2 tensor x 2 expert ranks: bytes / those of split experts", 0.55, share, "x", COMMAND)]


def host_reads(pool: WorkerPool) -> list[Row]:
    """Reads of the device on the host per layer and micro-batch, forward and backward."""
    padded = Shape(options={"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True})
    whole = ("moe-grouped-gemm", "moe-alltoall-dispatcher")
    cases: list[tuple[str, tuple[str, ...], Shape, int, int]] = [
        ("Megatron's all-to-all", (), Shape(), 2, 10),
        ("moe-alltoall-overlap", ("moe-alltoall-overlap",), Shape(), 2, 1),
        ("moe-allgather-overlap", ("moe-allgather-overlap",), Shape(), 2, 1),
        ("moe-alltoall-overlap, experts padded", ("moe-alltoall-overlap",), padded, 2, 0),
        ("moe-alltoall-dispatcher, experts on one rank", whole, Shape(), 1, 0),
    ]
    rows = []
    for name, features, shape, ranks, most in cases:
        seen = max(pool.call(reads, ranks, shape, plan=plan_of(*features, ep=ranks, level=2 if features else 0)))
        rows.append(Row(f"{name}: reads of the device on the host per layer", most, seen, "", COMMAND))
    return rows


def kept_bytes(pool: WorkerPool) -> list[Row]:
    """Activations that a layer keeps less, beside the formula."""
    shape = Shape()
    plain = pool.call(run, 2, shape, plan=plan_of("moe-alltoall-overlap"))[0]
    everything = closed_forms.kept(plain.rows, shape.hidden, shape.width, 4, activation=2)
    ends = 8 * shape.experts // 2
    less = {"level0": everything - closed_forms.kept_by_level0(plain.rows, shape.width, 4) + ends, "level1": everything + ends}
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


def overlapped_time(pool: WorkerPool) -> list[Row]:
    """Forward and backward of a layer with shared experts, beside Megatron's: on this machine, and with late transfers."""
    shape = Shape(WIDE.tokens, WIDE.hidden, WIDE.width, shared=2 * WIDE.width)
    delay = product_seconds(shape)
    ours, megatrons = plan_of("moe-alltoall-overlap"), plan_of("moe-grouped-gemm")

    def share(work: Callable[..., Any], *args: Any) -> float:
        turns = [[max(pool.call(work, 2, shape, *args, plan=plan)) for plan in (ours, megatrons)] for _ in range(2)]
        return float(min(turn[0] for turn in turns) / min(turn[1] for turn in turns))

    virtual = [max(rank.time for rank in pool.call(run_late, 2, Shape(shared=96), plan=plan)) for plan in (ours, megatrons)]
    name = "moe-alltoall-overlap, shared experts: layer time / Megatron's dispatcher"
    return [
        Row(f"{name}, transfers as they are", 1.05, share(seconds), "x", COMMAND),
        Row(f"{name}, transfers one product late", 0.80, share(delayed_seconds, delay), "x", COMMAND),
        Row(f"{name}, transfers one product late, virtual time", 0.80, virtual[0] / virtual[1], "x", COMMAND),
    ]


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
    paired_passes,
    processor_time_of_pairs,
    transfers_of_chunks,
    places_by_index,
    transfers_of_units,
    sent_bytes,
    once_per_rank,
    whole_experts,
    host_reads,
    kept_bytes,
    layer_time,
    overlapped_time,
    grouped_products,
)


def rows(tables: Sequence[Table] = TABLE) -> list[Row]:
    torch.set_num_threads(1)
    with WorkerPool(search_path=[str(Path(__file__).resolve().parents[1])]) as pool:
        return [row for table in tables for row in table(pool)]


if __name__ == "__main__":
    chosen = [table for table in TABLE if table.__name__ in sys.argv]
    sys.argv[1:] = [argument for argument in sys.argv[1:] if argument.endswith(".json")]
    main(lambda: rows(chosen or TABLE))
