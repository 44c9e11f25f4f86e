"""Does the trainer cost anything over a loop written by hand? Step time and peak memory, one process, same platform layer.

``python -m benchmarks.pretrain``; with an argument, ``trainer`` or ``loop``, it is one of the measured processes.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import timeit
from pathlib import Path
from typing import Any

from benchmarks.table import Row, main

COMMAND = "python -m benchmarks.pretrain"
NOISE = "read 0.99 to 1.04 in repeated runs: both loops do the same work, and two cores do not measure 2 %"
STEPS = 20


def rows() -> list[Row]:
    ratio = float(_run("time"))
    memory = [statistics.median(float(_run(kind)) for _ in range(3)) for kind in ("trainer", "loop")]
    return [
        Row("step of mindspeed pretrain / step of a loop by hand", 1.02, ratio, "x", COMMAND, NOISE),
        Row("peak memory of mindspeed pretrain / of a loop by hand", 1.02, memory[0] / memory[1], "x", COMMAND),
    ]


def _run(kind: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    with tempfile.TemporaryDirectory() as folder:
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "TMPDIR": folder}
        command = [sys.executable, "-m", "benchmarks.pretrain", kind]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()[-1]


def measure(kind: str) -> float:
    """Ratio of the fastest steps (``time``), or the peak memory in MiB of a process with only one of the two loops."""
    trainer = _trainer()
    steps = {"trainer": trainer._step, "loop": _loop(trainer)}
    if kind == "time":
        fastest = [min(timeit.repeat(step, number=1, repeat=STEPS // 4)) for _ in range(4) for step in steps.values()]
        return min(fastest[::2]) / min(fastest[1::2])  # other load of the machine only ever adds
    for _ in range(STEPS):
        steps[kind]()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _trainer() -> Any:
    from mindspeed import registry
    from mindspeed.registry import probe
    from mindspeed.workbench.training.job import make_job

    folder = Path(tempfile.mkdtemp())
    train = {"benchmark": {"run": str(folder), "log_interval": 10, "train_iters": 1000}}
    job = make_job([], train, probe())
    registry.activate(job.plan)

    import torch.distributed as dist
    from megatron.core import parallel_state

    from mindspeed.workbench.training.trainer import Trainer, seed_generators

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    seed_generators(0)
    return Trainer(job, job.source())


def _loop(trainer: Any) -> Any:
    """The same step as a Megatron script would write it, on the trainer's model and data."""
    import torch
    import torch.distributed as dist
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from torch.utils.tensorboard import SummaryWriter

    state, batches = trainer.state, trainer.train_batches
    log = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - open as long as the process
    scalars = SummaryWriter(tempfile.mkdtemp())
    losses = []

    def forward(data: Any, model: Any) -> Any:
        batch = next(data)
        return model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]), loss

    def loss(output: Any) -> Any:
        mean = output.float().mean()
        return mean, mean.detach().clone()

    def data(first: int) -> Any:
        for start in range(first, first + trainer.samples_per_step, batches.micro_batch_size):
            items = [batches.dataset[number] for number in range(start, start + batches.micro_batch_size)]
            yield {name: torch.stack([item[name] for item in items]) for name in ("tokens", "labels", "position_ids")}

    def step() -> None:
        for chunk in state.chunks:
            chunk.zero_grad_buffer()
        state.optimizer.zero_grad()
        reported = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=data(state.samples),
            model=state.chunks,
            num_microbatches=batches.count,
            seq_length=trainer.seq_length,
            micro_batch_size=batches.micro_batch_size,
            forward_only=False,
        )
        _, norm, _ = state.optimizer.step()
        state.scheduler.step(increment=1)
        mean = torch.stack(reported).mean()
        dist.all_reduce(mean)
        losses.append(mean.item())
        print(len(losses), losses[-1], norm, file=log)
        if len(losses) % 10 == 0:
            scalars.add_scalar("loss", losses[-1], len(losses))

    return step


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] in ("time", "trainer", "loop"):
        print(measure(sys.argv[1]))
    else:
        main(rows)
