"""Cycles of Megatron's model parallelism in a process that has a process group; what each leaves behind."""

from __future__ import annotations

import os


def held() -> tuple[int, int]:
    """Threads and open descriptors of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def cycles(count: int, tensor_parallel: int) -> list[tuple[int, int]]:
    """Create, use and destroy the groups ``count`` times; what the process holds after each."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state as state

    state.destroy_model_parallel()
    after = []
    for _ in range(count):
        state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
        dist.all_reduce(torch.ones(1), group=state.get_tensor_model_parallel_group())
        dist.barrier()
        state.destroy_model_parallel()
        after.append(held())
    state.initialize_model_parallel()
    return after
