"""What do the hooks of resiliency, and of metrics-export with two sinks, cost a step? CPU time with and without them, in turn.

``python -m benchmarks.resiliency``; it needs prometheus-client and opentelemetry-exporter-otlp-proto-http.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace

from benchmarks.table import Row, main, repetitions

COMMAND = "python -m benchmarks.resiliency"
STEPS = 5
PAIRS = 40
MODEL = {"num_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "seq_length": 128, "micro_batch_size": 2}
MICRO_BATCHES = 4
MEASURED = ("resiliency", "metrics-export")
SETTINGS = {"metrics-export": {"sinks": ["prometheus", "opentelemetry"], "prometheus_port": 19464}}
_THREADS = ("mindspeed-", "Otel")
"""Beginnings of the names of threads of the features, which run in steps with and without their hooks."""


def rows() -> list[Row]:
    return [_row(size) for size in (1, 2)]


def _row(size: int) -> Row:
    """Compare CPU time of all ranks; each has the same number of micro-batches."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(size), "BENCHMARK_FOLDER": folder}
        command = [sys.executable, "-m", "benchmarks.resiliency", "rank"]
        ranks = [
            subprocess.Popen(command, env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
            for rank in range(size)
        ]
        results = [json.loads(process.communicate()[0].splitlines()[-1]) for process in ranks]
    pairs = [tuple(map(sum, zip(*of_ranks, strict=True))) for of_ranks in zip(*(r["pairs"] for r in results), strict=True)]
    threads = sum(result["threads"] for result in results) / sum(map(sum, pairs))
    ratio = statistics.median(with_hooks / without for with_hooks, without in pairs) + threads
    step = statistics.median(without for _, without in pairs) / STEPS / size
    note = (
        f"{ratio - 1:+.2%} of {step * 1e3:.0f} ms per step and rank, threads {threads:.2%}; {len(pairs)} pairs of {STEPS} steps"
    )
    what = f"CPU time of a step with resiliency and two sinks / without, {size} {'ranks' if size > 1 else 'rank'}"
    return Row(what, 1.01, ratio, "x", COMMAND, note)


def measure() -> dict[str, object]:
    """Return CPU seconds of steps with and without the hooks, in pairs, and of the features' threads."""
    from mindspeed import registry
    from mindspeed.engine.resolution.request import Layer
    from mindspeed.registry import probe
    from mindspeed.workbench.training.job import make_job

    rank, size, folder = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["BENCHMARK_FOLDER"]
    train = {"benchmark": {"run": folder, "train_iters": 10_000}}
    batch = {"global_batch_size": MICRO_BATCHES * MODEL["micro_batch_size"] * size}
    layer = Layer("benchmark", world=MODEL | batch, features=MEASURED, settings=SETTINGS)
    job = make_job([layer], train, replace(probe(), world_size=size))
    registry.activate(job.plan)

    import torch.distributed as dist
    from megatron.core import parallel_state

    from mindspeed.engine.runtime import session
    from mindspeed.plugins.manager import FeatureManager
    from mindspeed.workbench.training.trainer import Trainer, seed_generators

    dist.init_process_group("nccl", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    parallel_state.initialize_model_parallel()
    seed_generators(0)
    trainer = Trainer(job, job.source())
    active = session.current()
    assert active is not None
    with_hooks = active.manager
    without = FeatureManager([feature for feature in with_hooks.features if feature.spec.name not in MEASURED])

    def spent() -> float:
        start = time.process_time()
        for _ in range(STEPS):
            trainer._step()
        return time.process_time() - start

    spent()
    threads, pairs = _of_threads(), []
    for number in range(repetitions(PAIRS)):
        times = {}
        for manager in (with_hooks, without) if number % 2 else (without, with_hooks):
            active.manager = manager
            times[manager is with_hooks] = spent()
        pairs.append((times[True], times[False]))
    return {"pairs": pairs, "threads": _of_threads() - threads}


def _of_threads() -> float:
    """Return CPU seconds of the threads of the features that are alive."""
    own = [thread.ident for thread in threading.enumerate() if thread.name.startswith(_THREADS)]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in own if ident is not None)


if __name__ == "__main__":
    if sys.argv[1:] == ["rank"]:
        print(json.dumps(measure()), flush=True)
        os._exit(0)
    else:
        main(rows)
