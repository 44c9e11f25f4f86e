"""Is ``mindspeed pretrain`` faster at optimization level 1 than at level 0? Steps of a Llama-style model, in turns.

``python -m benchmarks.levels``. Two processes train the same model on the same data, one at each level, and one waits while
the other makes a step. A turn is a pair of steps; the measured ratio is the median over the turns. The losses of both are
compared, too: a step that learns something else is not faster.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
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
TOLERANCES: Final = {"fp32": 1e-3, "bf16": 2e-2}
"""Largest relative difference of two losses: Adam grows a difference of 1e-7 in the gradients from step to step."""


@dataclass(frozen=True)
class Turns:
    """``seconds`` and ``losses`` of the steps of both levels, and the features that level 1 has and level 0 has not."""

    seconds: tuple[Sequence[float], Sequence[float]]
    losses: tuple[Sequence[float], Sequence[float]]
    features: Sequence[str]

    @property
    def ratios(self) -> list[float]:
        """Level 1 over level 0, turn by turn."""
        return [one / zero for zero, one in zip(*self.seconds, strict=True)]

    @property
    def apart(self) -> float:
        """Largest relative difference of the losses of one step."""
        return max(abs(one - zero) / abs(zero) for zero, one in zip(*self.losses, strict=True))


def rows() -> list[Row]:
    made = []
    for dtype in TOLERANCES:
        turns = compete(dtype)
        ratios, zero = turns.ratios, statistics.median(turns.seconds[0])
        note = f"{TURNS} pairs from {min(ratios):.3f} to {max(ratios):.3f}, level 0 {zero:.2f} s; {', '.join(turns.features)}"
        made += [
            Row(f"step of a Llama in {dtype}, level 1 / level 0", 1.0, statistics.median(ratios), "x", COMMAND, note),
            Row(f"its losses in {dtype}, largest relative difference", TOLERANCES[dtype], turns.apart, "", COMMAND),
        ]
    return made


def compete(dtype: str) -> Turns:
    """Let both levels make steps in turns; each goes first in every other turn."""
    seconds: tuple[list[float], list[float]] = ([], [])
    losses: tuple[list[float], list[float]] = ([], [])
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        processes = [stack.enter_context(_start(level, dtype, folder)) for level in (0, 1)]
        names = [json.loads(_line(process))["features"] for process in processes]
        for turn in range(-WARM, TURNS):
            for level in (0, 1) if turn % 2 else (1, 0):
                spent, loss = _step(processes[level])
                losses[level].append(loss)
                if turn >= 0:
                    seconds[level].append(spent)
        for process in processes:
            _pipe(process.stdin).close()
    return Turns(seconds, losses, [name for name in names[1] if name not in names[0]])


def _start(level: int, dtype: str, folder: str) -> subprocess.Popen[str]:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    environment = {**os.environ, **alone, "OMP_NUM_THREADS": str(THREADS)}
    command = [sys.executable, "-m", "benchmarks.levels", str(level), dtype, str(Path(folder) / f"level{level}")]
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


def serve(level: int, dtype: str, folder: str) -> None:
    """One of the two processes: say which features are active, then make a step for every line that comes."""
    trainer = trainer_of(level, dtype, folder)
    print(json.dumps({"features": list(trainer.job.plan.names)}), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        trainer._step()
        spent = time.perf_counter() - start
        last = (Path(folder) / "log.jsonl").read_text(encoding="utf-8").splitlines()[-1]
        print(json.dumps({"seconds": spent, "loss": json.loads(last)["loss"]}), flush=True)


def trainer_of(level: int, dtype: str, folder: str) -> Any:
    """The trainer of ``mindspeed pretrain`` at a level, in this process."""
    from mindspeed import registry
    from mindspeed.engine.resolution.request import Layer
    from mindspeed.registry import probe
    from mindspeed.workbench.training.job import make_job

    train = {"benchmark": {"run": folder, "log_interval": 1, "train_iters": 1000, "lr": 1e-3}}
    job = make_job([Layer("benchmark", world=SHAPE | {"dtype": dtype}, level=level)], train, probe())
    registry.activate(job.plan)

    import torch.distributed as dist
    from megatron.core import parallel_state

    from mindspeed.workbench.training.trainer import Trainer, seed_generators

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    seed_generators(job.config.seed)
    return Trainer(job, job.source())


if __name__ == "__main__":
    if len(sys.argv) == 4:
        serve(int(sys.argv[1]), *sys.argv[2:])
    else:
        main(rows)
