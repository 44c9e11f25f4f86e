"""Jobs of the proof harness's workers leave nothing behind that the next ones would pay for."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed import plan
from mindspeed.verification.pool import WorkerPool
from mindspeed.verification.shape import GPT, Recipe

TASKS = Path("/proc/self/task")
GROUPS = 2
"""Loops of gloo that a job may leave: those of the whole world's group, whose freeing is torch's."""


def trained_once() -> None:
    """A model of its own, whose layers know Megatron's sixteen groups."""
    import torch
    from megatron.core import tensor_parallel

    from mindspeed.verification.model import build_chunks

    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    (chunk,) = build_chunks(Recipe(GPT))
    tokens = torch.zeros(1, GPT.seq_length, dtype=torch.int64)
    hidden = torch.ones(1, 1, GPT.seq_length, GPT.seq_length, dtype=torch.bool).triu(1)
    chunk.remembered = chunk(tokens, tokens, hidden, labels=tokens)  # a circle through nodes of autograd
    chunk.remembered.sum().backward()


def loops_of_gloo() -> int:
    """Threads of this process that serve a process group."""
    return sum((task / "comm").read_text().startswith("gloo_tcp_loop") for task in TASKS.iterdir())


@pytest.mark.skipif(not TASKS.exists(), reason="threads are counted in /proc, which is Linux's")
def test_a_model_that_a_job_made_keeps_no_process_groups_alive(pool: WorkerPool) -> None:
    (before,) = pool.call(loops_of_gloo, 1)
    for _ in range(3):
        pool.call(trained_once, 1, plan=plan(platform="cpu", level=0))
    (after,) = pool.call(loops_of_gloo, 1)
    assert after - before <= 3 * GROUPS
