"""Compare the nodes of a job with one another, and measure the bandwidth between each two: one process per node, or per device.

Every process calls `compare_nodes`; rank 0 gets the report.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from mindspeed.engine.planning.fingerprint import numeric_variables
from mindspeed.engine.runtime.launch import SAVING_TIME
from mindspeed.platforms import runtime
from mindspeed.problems import Fix, Problem, RunError
from mindspeed.workbench.diagnostics import ascend
from mindspeed.workbench.diagnostics.preflight import GIB, SHARED_MEMORY, PreflightCheck

DIFFERS: Final = "MS521"
"""Code of a node that differs from most others, and of a slow pair."""
CLOCK: Final = 1.0
"""Seconds by which clocks may differ."""
SLOW: Final = 0.7
"""Share of the median bandwidth below which a pair is slow."""
REPEATS: Final = 3
"""Transfers of a pair, of which the fastest counts."""
SHOWN: Final = 12
_DRIVER: Final = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Hold the facts of a node that must be ``equal`` on all, its free GiB of shared memory, and its clock in seconds."""

    host: str
    equal: Mapping[str, str]
    shared_memory: float
    clock: float


@dataclass(frozen=True, slots=True)
class PairBandwidth:
    """The bandwidth between two ranks in each direction while both send, in 10^9 bytes per second."""

    first: int
    second: int
    rate: float


def compare_nodes(job: Mapping[str, str], mebibytes: int, limit: float, free_shm: float) -> list[PreflightCheck]:
    """Join a job (``engine.runtime.launch.joined``), and return the checks of all nodes on rank 0, none on the others.

    ``mebibytes`` are sent for a measurement; a process waits ``limit`` seconds for the others. Raises RunError with MS611
    where they do not come or no longer answer.
    """
    os.environ.update(job)
    rank, size = int(job["RANK"]), int(job["WORLD_SIZE"])
    if runtime.platform() != "cpu":
        runtime.take_device(int(job["LOCAL_RANK"]))
    step = "meet"
    try:
        dist.init_process_group(runtime.backend(), rank=rank, world_size=size, timeout=timedelta(seconds=limit))
        try:
            dist.barrier()
            facts = _gathered(facts_here())
            pairs: list[PairBandwidth] = []
            for here in rounds(size):
                step = "wait for the others"
                dist.barrier()
                partner = next((first + second - rank for first, second in here if rank in (first, second)), None)
                if partner is None:
                    continue
                step = f"exchange {mebibytes} MiB with rank {partner}"
                seconds = _exchange_seconds(partner, mebibytes * 2**20)
                if rank < partner:
                    pairs.append(PairBandwidth(rank, partner, mebibytes * 2**20 / seconds / 1e9))
            step = "gather the results"
            found = [pair for pairs_of_rank in _gathered(pairs) for pair in pairs_of_rank]
        finally:
            dist.destroy_process_group()
    except RuntimeError as error:  # torch's errors of stores and backends
        first = str(error).strip().splitlines()[0]
        text = f"rank {rank} on {os.uname().nodename} could not {step}: {first}"
        fix = "start one process on every node; look at the processes that do not answer, their network and firewall"
        raise RunError([Problem("MS611", text, fix=Fix.advise(fix))]) from error
    if rank:
        return []
    return [*_equal_facts(facts), _clocks(facts), _shared_memory(facts, free_shm), *_bandwidth(facts, found)]


def facts_here() -> NodeFacts:
    """Ask this node and process."""
    free = shutil.disk_usage(SHARED_MEMORY).free / GIB if SHARED_MEMORY.is_dir() else 0.0
    return NodeFacts(os.uname().nodename, dict(_equal_here()), free, time.time())


def _equal_here() -> Iterator[tuple[str, str]]:
    yield "torch", torch.__version__
    yield "kernel", os.uname().release
    platform = runtime.platform()
    yield "devices", f"{runtime.device_module().device_count()} {platform}" if platform != "cpu" else f"{os.cpu_count()} cpu"
    if platform == "cuda":
        yield "nccl", ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        yield "driver", _DRIVER.read_text(encoding="utf-8").splitlines()[0] if _DRIVER.is_file() else "unknown"
    elif platform == "npu":
        yield from ((finding.subject, finding.value) for finding in ascend.findings())
    yield "saving-time", os.environ.get(SAVING_TIME, "unset")
    yield from numeric_variables(os.environ).items()


def rounds(size: int) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of pairs in which each two of ``size`` ranks meet once and no rank has two partners: a round-robin
    tournament by the circle method."""
    ranks: list[int | None] = [*range(size), *([None] if size % 2 else [])]
    half = len(ranks) // 2
    for _ in range(len(ranks) - 1):
        sides = zip(ranks[:half], reversed(ranks[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in sides if a is not None and b is not None]
        ranks.insert(1, ranks.pop())


def _exchange_seconds(partner: int, size: int) -> float:
    """Send ``size`` bytes to a rank and receive as many, several times; return the seconds of the fastest time."""
    sent = torch.ones(size, dtype=torch.uint8, device=runtime.device())
    received = torch.empty_like(sent)
    return min(_exchange(sent, received, partner) for _ in range(REPEATS + 1))  # the first one connects


def _exchange(sent: torch.Tensor, received: torch.Tensor, other: int) -> float:
    """Send a tensor to a rank and receive one; return the seconds."""
    begin = time.perf_counter()
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, received, other)]):
        work.wait()
    if runtime.platform() != "cpu":
        runtime.device_module().synchronize()
    return time.perf_counter() - begin


def _gathered(value: Any) -> list[Any]:
    """The values of all ranks, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _equal_facts(facts: Sequence[NodeFacts]) -> Iterator[PreflightCheck]:
    """A check for each fact: the ranks that differ from most, and how."""
    for name in dict.fromkeys(name for node in facts for name in node.equal):
        values = [node.equal.get(name, "unset") for node in facts]
        [(wanted, count)] = Counter(values).most_common(1)
        apart = [f"{_named(facts, rank)}: {value}" for rank, value in enumerate(values) if value != wanted]
        found = "; ".join(apart[:SHOWN]) + (f"; and {len(apart) - SHOWN} more" if len(apart) > SHOWN else "")
        fix = f"give these nodes the {name} of the others, or leave them out"
        wanted_text = f"{wanted} as on {count} of {len(facts)}"
        yield PreflightCheck(f"nodes-{name}", not apart, found or f"{wanted} on all {len(facts)}", wanted_text, fix, DIFFERS)


def _clocks(facts: Sequence[NodeFacts]) -> PreflightCheck:
    middle = statistics.median(node.clock for node in facts)
    apart = {rank: node.clock - middle for rank, node in enumerate(facts)}
    wrong = [f"{_named(facts, rank)}: {seconds:+.1f} s" for rank, seconds in apart.items() if abs(seconds) > CLOCK]
    found = "; ".join(wrong[:SHOWN]) or f"at most {max(map(abs, apart.values())):.1f} s apart"
    return PreflightCheck(
        "nodes-clock", not wrong, found, f"at most {CLOCK:g} s", "start a time service on these nodes", DIFFERS
    )


def _shared_memory(facts: Sequence[NodeFacts], wanted: float) -> PreflightCheck:
    free = [node.shared_memory for node in facts]
    small = [f"{_named(facts, rank)}: {room:.1f} GiB" for rank, room in enumerate(free) if room < wanted]
    found = "; ".join(small[:SHOWN]) or f"at least {min(free):.1f} GiB free"
    fix = "start these containers with a larger --shm-size"
    return PreflightCheck("nodes-shared-memory", not small, found, f"{wanted:g} GiB", fix, "MS503")


def _bandwidth(facts: Sequence[NodeFacts], pairs: Sequence[PairBandwidth]) -> Iterator[PreflightCheck]:
    """A check of the pairs within nodes, and one of those between nodes, as far as there are such."""
    for place, inside in (("within-nodes", True), ("between-nodes", False)):
        here = [pair for pair in pairs if (facts[pair.first].host == facts[pair.second].host) is inside]
        if here:
            yield _bandwidth_of(f"bandwidth-{place}", facts, here)


def _bandwidth_of(name: str, facts: Sequence[NodeFacts], pairs: Sequence[PairBandwidth]) -> PreflightCheck:
    """Name the pairs that are slow, and first the ranks that most of these have in common."""
    middle = statistics.median(pair.rate for pair in pairs)
    slow = sorted((pair for pair in pairs if pair.rate < SLOW * middle), key=lambda pair: pair.rate)
    of_ranks = Counter(rank for pair in slow for rank in (pair.first, pair.second))
    all_pairs = Counter(rank for pair in pairs for rank in (pair.first, pair.second))
    ranks = [rank for rank, count in of_ranks.most_common() if count > 1 and count > all_pairs[rank] / 2]
    said = [f"{_named(facts, rank)} is slow with {of_ranks[rank]} of {all_pairs[rank]} others" for rank in ranks]
    rest = [pair for pair in slow if pair.first not in ranks and pair.second not in ranks]
    said += [f"{_named(facts, pair.first)} and {_named(facts, pair.second)}: {pair.rate:.2f} GB/s" for pair in rest]
    more = [f"and {len(said) - SHOWN} more"] if len(said) > SHOWN else []
    least = min(pair.rate for pair in pairs)
    median = f"median {middle:.2f} GB/s, least {least:.2f} GB/s of {len(pairs)} pairs"
    found = "; ".join([*said[:SHOWN], *more, median])
    fix = "test the network of these nodes, or leave them out"
    return PreflightCheck(name, not slow, found, f"at least {SLOW:.0%} of the median", fix, DIFFERS)


def _named(facts: Sequence[NodeFacts], rank: int) -> str:
    return f"rank {rank} on {facts[rank].host}"
