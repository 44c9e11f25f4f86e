"""Is ``mindspeed pretrain`` faster at optimization level 1 than at level 0, and than a loop by hand without mindspeed?

``python -m benchmarks.levels``. Processes train the same model, one at each level and one with unmodified megatron-core, and
wait while another one makes a step. A turn is one step of each; a measured ratio is the median over the turns. The losses of
both levels are compared, too: a step that learns something else is not faster. Unmodified Megatron builds no model with experts
on a machine without Transformer Engine.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from benchmarks.table import Row, main

COMMAND: Final = "python -m benchmarks.levels"
TURNS: Final = 9
WARM: Final = 2
"""Steps before the first turn: the first one imports and allocates."""
THREADS: Final = 2
SHAPE: Final = {
    "num_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "seq_length": 512,
    "micro_batch_size": 1,
    "global_batch_size": 2,
}
STOCK: Final = "stock"
TRAINERS: Final[dict[str, tuple[int, dict[str, Any]]]] = {
    "level 0": (0, {}),
    "level 1": (1, {}),
    "level 1, grouped experts": (1, {"grouped_experts": True}),
}
"""Level and further model options of each process that is a ``mindspeed pretrain``."""
MODELS: Final[dict[str, tuple[dict[str, Any], Sequence[str]]]] = {
    "dense": ({}, ("level 0", "level 1", STOCK)),
    "MoE": ({"num_experts": 8, "moe_ffn_hidden_size": 688, "router_topk": 2}, tuple(TRAINERS)),
}
"""Sizes of each model, and the processes that train it."""
COMPARED: Final = (
    ("level 1", "level 0", 1.0),
    ("level 1, grouped experts", "level 0", 1.0),
    ("level 0", STOCK, 1.02),
    ("level 1", STOCK, 1.02),
)
"""A process, that which it is compared with, and the largest ratio of their times."""
TOLERANCES: Final = {"fp32": 1e-3, "bf16": 5e-2}
"""Largest relative difference of two losses: Adam grows a difference of 1e-7 in the gradients from step to step, and in bf16
routers choose other experts for some tokens."""


@dataclass(frozen=True)
class Turns:
    """``seconds``, ``losses`` and ``features`` of each process."""

    seconds: Mapping[str, Sequence[float]]
    losses: Mapping[str, Sequence[float]]
    features: Mapping[str, Sequence[str]]

    def ratios(self, one: str, other: str) -> list[float]:
        """Seconds of one process over those of another, turn by turn."""
        return [mine / theirs for mine, theirs in zip(self.seconds[one], self.seconds[other], strict=True)]

    def apart(self, one: str, other: str) -> float:
        """Largest relative difference of the losses of a step."""
        return max(abs(mine - theirs) / theirs for mine, theirs in zip(self.losses[one], self.losses[other], strict=True))


def rows() -> list[Row]:
    made = []
    for model, (_, processes) in MODELS.items():
        for dtype, tolerance in TOLERANCES.items():
            turns = compete(dtype, model)
            for one, other, target in (pair for pair in COMPARED if {*pair[:2]} <= {*processes}):
                ratios, base = turns.ratios(one, other), statistics.median(turns.seconds[other])
                more = [name for name in turns.features[one] if name not in turns.features[other]]
                note = f"{TURNS} turns from {min(ratios):.3f} to {max(ratios):.3f}, {other} {base:.2f} s; {', '.join(more)}"
                name = f"{dtype} step of a {model} Llama: {one} / {other}"
                made.append(Row(name, target, statistics.median(ratios), "x", COMMAND, note.removesuffix("; ")))
                if other != STOCK:
                    made.append(Row(f"{name}, difference of losses", tolerance, turns.apart(one, other), "", COMMAND))
    return made


def compete(dtype: str, model: str) -> Turns:
    """Let the processes make steps in turns; they go in the other order in every other turn."""
    _, names = MODELS[model]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        processes = {name: stack.enter_context(_start(name, dtype, model, folder)) for name in names}
        features = {name: json.loads(_line(process))["features"] for name, process in processes.items()}
        for turn in range(-WARM, TURNS):
            for name in names if turn % 2 else names[::-1]:
                spent, loss = _step(processes[name])
                losses[name].append(loss)
                if turn >= 0:
                    seconds[name].append(spent)
        for process in processes.values():
            _pipe(process.stdin).close()
    return Turns(seconds, losses, features)


def _start(name: str, dtype: str, model: str, folder: str) -> subprocess.Popen[str]:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    environment = {**os.environ, **alone, "OMP_NUM_THREADS": str(THREADS)}
    program = ["benchmarks.levels", name, dtype, model, str(Path(folder) / name)]
    if name == STOCK:
        program = ["benchmarks._stock_step", dtype, json.dumps(SHAPE)]
    command = [sys.executable, "-m", *program]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _step(process: subprocess.Popen[str]) -> tuple[float, float]:
    _pipe(process.stdin).write("step\n")
    _pipe(process.stdin).flush()
    answer = json.loads(_line(process))
    return answer["seconds"], answer["loss"]


def _line(process: subprocess.Popen[str]) -> str:
    """The next answer of a process, which prints other lines too."""
    for line in _pipe(process.stdout):
        if line.startswith("{"):
            return line
    raise RuntimeError(f"a training process ended with exit status {process.wait()}")


def _pipe(stream: IO[str] | None) -> IO[str]:
    if stream is None:
        raise RuntimeError("a training process has no pipe")
    return stream


def serve(name: str, dtype: str, model: str, folder: str) -> None:
    """Be a process that trains with mindspeed: print which features are active, then make a step for every line that comes."""
    trainer = trainer_of(name, dtype, model, folder)
    print(json.dumps({"features": list(trainer.job.plan.names)}), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        trainer._step()
        spent = time.perf_counter() - start
        last = (Path(folder) / "log.jsonl").read_text(encoding="utf-8").splitlines()[-1]
        print(json.dumps({"seconds": spent, "loss": json.loads(last)["loss"]}), flush=True)


def trainer_of(name: str, dtype: str, model: str, folder: str) -> Any:
    """The trainer of ``mindspeed pretrain`` at its level, in this process."""
    from mindspeed import registry
    from mindspeed.engine.resolution.request import Layer
    from mindspeed.registry import probe
    from mindspeed.workbench.training.job import make_job

    level, options = TRAINERS[name]
    train = {"benchmark": {"run": folder, "log_interval": 1, "train_iters": 1000, "lr": 1e-3}}
    job = make_job(
        [Layer("benchmark", world={**SHAPE, **MODELS[model][0], **options, "dtype": dtype}, level=level)], train, probe()
    )
    registry.activate(job.plan)

    import torch.distributed as dist
    from megatron.core import parallel_state

    from mindspeed.workbench.training.trainer import Trainer, seed_generators

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    seed_generators(job.config.seed)
    return Trainer(job, job.source())


if __name__ == "__main__":
    if len(sys.argv) == 5:
        serve(*sys.argv[1:])
    else:
        main(rows)
