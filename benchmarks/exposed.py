"""Exposed transfer time of features by simulation: ``python -m benchmarks.exposed [CASE ...] [--write]``.

A step of a rank is recorded in a dry run: layers of a published model without contents of tensors, in one process. Of a ring, a
forward and a backward pass of one layer are recorded on every rank, for a rank waits for what others have. The simulator
`mindspeed.workbench.exposure` runs the recorded order of products, posts and waits on machines with published links. Only
products and attention take time, so a real device hides somewhat more. With --write the results go to the features' pages.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from benchmarks._ring_program import RingJob, ring_programs
from mindspeed.engine.resolution.request import Layer
from mindspeed.workbench.exposure.machines import PUBLISHED, Topology
from mindspeed.workbench.exposure.programs import Computation, Event, Programs, at_once
from mindspeed.workbench.exposure.recorded import programs_of_steps
from mindspeed.workbench.exposure.simulator import Interval, simulate
from mindspeed.workbench.verification.case import build_case, with_few_micro_batches
from mindspeed.workbench.verification.pool import WorkerPool

RESULTS: Final = Path(__file__).with_name("exposed.json")
DENSE: Final[Mapping[str, Any]] = {
    "world_size": 128,
    "num_layers": 4,
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "vocab_size": 128256,
    "seq_length": 8192,
    "micro_batch_size": 1,
    "global_batch_size": 128,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation": "silu",
    "rotary": True,
    "tied_embeddings": False,
    "dtype": "bf16",
}
"""Layers of Llama 3 8B; four of them, which differ in nothing."""
LONG: Final = DENSE | {"world_size": 16, "cp": 16, "seq_length": 131072, "global_batch_size": 1}
SPARSE: Final = DENSE | {
    "world_size": 16,
    "ep": 16,
    "num_experts": 64,
    "moe_ffn_hidden_size": 14336,
    "grouped_experts": True,
    "global_batch_size": 16,
}
"""Experts of the size of Mixtral's, 64 of them on 16 ranks; a token goes to two."""
LATENT: Final = DENSE | {
    "world_size": 8,
    "tp": 8,
    "hidden_size": 7168,
    "ffn_hidden_size": 18432,
    "num_attention_heads": 128,
    "num_query_groups": 128,
    "seq_length": 4096,
    "global_batch_size": 1,
    "multi_latent_attention": True,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
}
"""Dense layers of DeepSeek-V3 on tensor-parallel ranks."""
COLUMNS: Final = ("transfers", "at once", "exposed")


@dataclass(frozen=True)
class Case:
    """What is recorded: features with settings, in a job.

    It is the second step, up to its last product or as a ``whole``, or with ``optimizer`` the first one with the optimizer's.
    It has as few micro-batches as show the schedule, unless ``all_micro_batches``.
    """

    features: tuple[str, ...]
    world: Mapping[str, Any]
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    whole: bool = False
    optimizer: bool = False
    all_micro_batches: bool = False


ALONE: Final = DENSE | {"world_size": 1, "global_batch_size": 1}
SHARED: Final = {"moe-shared-experts": {"count": 2}}
RING: Final = RingJob(16, tokens=8192, heads=32, groups=8, width=128)
CASES: Final[Mapping[str, Case | RingJob]] = {
    "ring-attention": RING,
    "ring-attention, window 8": replace(RING, window=8),
    "ring-attention, 1,024 tokens per rank": replace(RING, tokens=1024),
    "ring-attention, 1,024 tokens per rank, window 8": replace(RING, tokens=1024, window=8),
    "hybrid-attention": Case(("hybrid-attention", "flash-attention"), LONG, {"hybrid-attention": {"ulysses_degree": 8}}),
    "adaptive-cp": Case(("adaptive-cp", "flash-attention"), LONG),
    "coc": Case(
        ("coc", "sequence-parallel"), DENSE | {"world_size": 8, "tp": 8, "global_batch_size": 1}, {"coc": {"parts": 4}}
    ),
    "mla-split": Case(("mla-split", "sequence-parallel"), LATENT),
    "async-ddp": Case(("async-ddp",), DENSE, whole=True),
    "async-param-gather": Case(("async-param-gather",), DENSE, whole=True),
    "moe-alltoall-overlap": Case(("moe-alltoall-overlap", "moe-shared-experts"), SPARSE, SHARED),
    "moe-alltoall-overlap, parts 4": Case(("moe-alltoall-overlap",), SPARSE, {"moe-alltoall-overlap": {"parts": 4}}),
    "moe-allgather-overlap": Case(("moe-allgather-overlap", "moe-shared-experts"), SPARSE, SHARED),
    "moe-zero-memory": Case(("moe-zero-memory",), SPARSE, {"moe-zero-memory": {"level": "level1"}}),
    "moe-fb-overlap": Case(("moe-fb-overlap",), SPARSE | {"global_batch_size": 128}, all_micro_batches=True),
    "moe-fb-overlap, shared experts": Case(
        ("moe-fb-overlap", "moe-alltoall-overlap", "moe-shared-experts"),
        SPARSE | {"global_batch_size": 128},
        SHARED,
        all_micro_batches=True,
    ),
    "ampipe": Case(("ampipe", "moe-alltoall-overlap"), SPARSE, {"ampipe": {"parts": 2}}),
    "pipe-experts": Case(("pipe-experts",), SPARSE, {"pipe-experts": {"parts": 2}}),
    "swap-attention": Case(("swap-attention", "flash-attention"), ALONE),
    "swap-optimizer": Case(("swap-optimizer",), ALONE, optimizer=True),
}
"""Every feature that overlaps transfers with compute. The name of a further case begins with that of its feature."""


def record(pool: WorkerPool, case: Case | RingJob) -> Programs:
    """Return the program of a step, of the first rank of each pipeline stage; or those of all ranks of a ring."""
    if isinstance(case, RingJob):
        return ring_programs(case, "both")
    with tempfile.TemporaryDirectory() as folder:
        log = {"collective_log": f"{folder}/{{rank}}", "log_steps": True}
        layers = [Layer("exposed", world=case.world, settings={**case.settings, "device-emulation": log})]
        made = build_case(case.features, layers, (), int(case.world["world_size"]))
        if not case.all_micro_batches:
            few = with_few_micro_batches(made.plan.world)
            made = build_case(case.features, [*layers, few], (), int(case.world["world_size"]))
        pool.dry_run(made.plan, made.recipe)
        return {int(file.name): _recorded(file, case) for file in sorted(Path(folder).iterdir())}


def _recorded(file: Path, case: Case) -> list[Event]:
    """The program of a case in the log of a rank."""
    first, second = programs_of_steps(file.read_text("utf-8").splitlines(), int(file.name))
    if case.optimizer or case.whole:
        return first if case.optimizer else second
    last = max(place for place, event in enumerate(second) if isinstance(event, Computation))
    return second[: last + 1]


def simulated(programs: Programs, machine: Topology) -> dict[str, Any]:
    """Return the milliseconds of transfers and of exposed ones, as recorded and where each is waited for at once; and lanes."""
    found = simulate(programs, machine)
    rank = found.slowest
    late = simulate({rank: at_once(program) for rank, program in programs.items()}, machine)
    numbers = found.transferred(rank), late.exposed(rank), found.exposed(rank)
    lanes = {"compute": [kernel for kernel in found.kernels if kernel.rank == rank]}
    for transfer in [transfer for transfer in found.transfers if transfer.rank == rank]:
        lanes.setdefault(transfer.lane, []).append(transfer)
    drawn = {name: _merged(intervals, found.makespan) for name, intervals in lanes.items()}
    return {
        **{name: round(number * 1e3, 3) for name, number in zip(COLUMNS, numbers, strict=True)},
        "step": round(found.makespan * 1e3, 3),
        "lanes": drawn,
    }


def _merged(intervals: Iterable[Interval], end: float, cells: int = 240) -> list[list[int]]:
    """Return intervals in cells of a picture, those that touch as one."""
    made: list[list[int]] = []
    for one in sorted(intervals, key=lambda one: one.begin):
        begin, stop = round(one.begin / end * cells), max(round(one.end / end * cells), round(one.begin / end * cells) + 1)
        if made and begin <= made[-1][1]:
            made[-1][1] = max(made[-1][1], stop)
        else:
            made.append([begin, stop])
    return made


def measure(names: Sequence[str]) -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """Yield each case with its results by machine."""
    with WorkerPool() as pool:
        for name in names:
            programs = record(pool, CASES[name])
            yield name, {machine.name: simulated(programs, machine) for machine in PUBLISHED}


def main(arguments: Sequence[str]) -> None:
    names = [name for name in arguments if not name.startswith("--")] or list(CASES)
    for name, results in measure(names):
        for machine, row in results.items():
            print(f"{name:48} {machine:14}", *(f"{column} {row[column]:10.3f} ms" for column in (*COLUMNS, "step")), flush=True)
        if "--write" in arguments:
            known = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
            known[name] = results
            RESULTS.write_text(json.dumps({case: known[case] for case in CASES if case in known}) + "\n", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
