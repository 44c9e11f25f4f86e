"""Is a pipeline as fast as its schedule? Stages that sleep on four ranks of gloo, and a small GPT on two that computes.

``python -m benchmarks.pipeline``. Candidates run in turn: Megatron's schedule, ours, Megatron's again as the control, and
Megatron's list on our executor. A step lasts from a common start to the end of its last rank. Stages that sleep measure the
schedule also on fewer cores than ranks; the GPT needs a core for each rank, and other load is in its numbers.
``--trace FOLDER`` measures nothing: it keeps a recorded step of stages that sleep for each feature with a schedule, in a folder
of its name, for ``mindspeed schedule show --trace``.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import mindspeed
from benchmarks.table import Row, main
from mindspeed.pipeline.operations import PipelineShape
from mindspeed.pipeline.simulator import judge
from mindspeed.pipeline.synthesis import delayed, megatron
from mindspeed.workbench.verification.pool import WorkerPool

COMMAND: Final = "python -m benchmarks.pipeline"
NAP: Final = 0.02
ROUNDS: Final = 9
HIDDEN: Final = 384
MODEL: Final = {"tied_embeddings": False, "mtp_num_layers": 0}


def on_rank(*arguments: Any) -> Any:
    """Measure on this rank; the module needs Megatron, which the process of the table does not import."""
    from benchmarks._pipeline_steps import measured

    return measured(*arguments)


def overlap_on_rank(*arguments: Any) -> Any:
    """Measure steps that overlap on this rank."""
    from benchmarks._pipeline_steps import overlapped

    return overlapped(*arguments)


def record_on_rank(micro_batches: int) -> None:
    """Run a step of stages that sleep on this rank."""
    from benchmarks._pipeline_steps import sleeping_step

    sleeping_step(micro_batches)


FEATURES: Final[dict[str, dict[str, Any]]] = {
    "nano-pipe": {"output_layer": True},
    "zero-bubble": {"placement": "v"},
    "recompute-in-advance": {},
    "recompute-in-bubble": {},
}


def plan(ranks: int, vpp: int, micro_batches: int, feature: str = "nano-pipe", **settings: Any) -> Any:
    features = [feature, *(["virtual-pipeline"] if vpp > 1 else [])]
    sizes = {"world_size": ranks, "pp": ranks, "vpp": vpp, "num_layers": 8}
    world = {**sizes, "micro_batch_size": 1, "global_batch_size": micro_batches, **MODEL}
    return mindspeed.plan(features=features, platform="cpu", settings={feature: FEATURES[feature] | settings}, world=world)


def shares(times: dict[str, list[float]], rounds: int) -> dict[str, float]:
    """The median over rounds of each candidate's time as a share of Megatron's in the same round."""
    return {name: statistics.median(times[name][turn] / times["Megatron"][turn] for turn in range(rounds)) for name in times}


def load() -> str:
    """Return the load of the machine, which wakes late who sleeps and slows down who computes."""
    return f"{os.getloadavg()[0]:.0f} processes ready on {os.cpu_count()} cores"


def sleeping_rows(pool: WorkerPool, trace: str) -> list[Row]:
    """Four ranks of stages that sleep for every forward pass, input gradient and weight gradient."""
    result = pool.call(on_rank, 4, "nano-pipe", 2, 16, ROUNDS, 0, trace, plan=plan(4, 2, 16))[0]
    share = shares(result["times"], ROUNDS)
    ours = statistics.median(result["times"]["ours"])
    base = "stages that sleep 20 ms, 4 ranks, vpp 2, 16 micro-batches"
    note = (
        f"a recorded step {result['recorded']:.3f} s, simulated with its mean durations {result['simulated']:.3f} s; {load()}"
    )
    return [
        Row(f"{base}: a step of nano-pipe / the floor", 1.03, ours / (result["floor"] * NAP), "x", COMMAND, note),
        Row(f"{base}: a step of nano-pipe / Megatron's interleaved", 0.96, share["ours"], "x", COMMAND),
        Row(f"{base}: Megatron's list on the executor / Megatron", 1.01, share["Megatron's list"], "x", COMMAND),
        Row(f"{base}: control, Megatron / Megatron, off by", 0.05, abs(share["Megatron again"] - 1), "", COMMAND),
    ]


def overlapping_rows(pool: WorkerPool) -> list[Row]:
    """Four ranks of stages that sleep, with an optimizer that waits for the others or is validated later."""
    settings = {"placement": "loop", "post_validation": True}
    result = pool.call(overlap_on_rank, 4, 8, 6, 3, 0.06, plan=plan(4, 1, 8, "zero-bubble", **settings))[0]
    synchronized, later, again = map(statistics.median, result["times"].values())
    base = "stages that sleep 60 ms, 4 ranks, 8 micro-batches, 6 steps with an optimizer"
    note = f"{result['expected']:.3f} by the simulator; {load()}"
    target = 1 - (1 - result["expected"]) / 2
    return [
        Row(f"{base}: zero-bubble.post_validation / synchronized steps", target, later / synchronized, "x", COMMAND, note),
        Row(f"{base}: control, synchronized / synchronized, off by", 0.05, abs(again / synchronized - 1), "", COMMAND),
    ]


def computing_rows(pool: WorkerPool, vpp: int, target: float, trace: str) -> list[Row]:
    """Two ranks of a GPT."""
    result = pool.call(on_rank, 2, "nano-pipe", vpp, 4, ROUNDS, HIDDEN, trace, plan=plan(2, vpp, 4))[0]
    share = shares(result["times"], ROUNDS)
    base = f"GPT of width {HIDDEN}, 2 ranks, {'vpp 2, ' if vpp > 1 else ''}4 micro-batches"
    own = megatron(PipelineShape(2, vpp, 4))
    theory = judge(delayed(own, range(2))).makespan / judge(own).makespan
    name = "interleaved" if vpp > 1 else "1F1B"
    note = f"{theory:.3f} by the simulator for F = B = W; {load()}"
    off = abs(result["recorded"] - result["simulated"]) / result["recorded"]
    return [
        Row(f"{base}: a step of nano-pipe / Megatron's {name}", target, share["ours"], "x", COMMAND, note),
        Row(f"{base}: recorded step and simulated one with its mean durations, apart by", 0.03, off, "", COMMAND),
        Row(f"{base}: control, Megatron / Megatron, off by", 0.05, abs(share["Megatron again"] - 1), "", COMMAND),
    ]


SEARCH_PATH: Final = [str(Path(__file__).resolve().parents[1])]


def rows() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder, WorkerPool(search_path=SEARCH_PATH) as pool:
        return [
            *sleeping_rows(pool, folder),
            *overlapping_rows(pool),
            *computing_rows(pool, 1, 0.87, folder),
            *computing_rows(pool, 2, 0.95, folder),
        ]


def record(folder: Path) -> None:
    """Keep the records of a step of every feature on stages that sleep: 4 ranks, vpp 2, 16 micro-batches."""
    with WorkerPool(search_path=SEARCH_PATH) as pool:
        for feature in FEATURES:
            pool.call(record_on_rank, 4, 16, plan=plan(4, 2, 16, feature, trace=str((folder / feature).resolve())))


if __name__ == "__main__":
    if "--trace" in sys.argv:
        record(Path(sys.argv[-1]))
    else:
        main(rows)
