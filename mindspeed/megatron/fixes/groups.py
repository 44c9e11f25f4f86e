"""Process groups of gloo that outlive Megatron's model parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed.distributed_c10d import _world


def destroy_groups(destroy_model_parallel: Callable[[], None]) -> Callable[[], None]:
    """``destroy_model_parallel`` with the groups themselves destroyed, which Megatron only forgets, and some not even that."""

    @wraps(destroy_model_parallel)
    def destroyed() -> None:
        state = vars(parallel_state)
        groups = set(_process_groups(state.values())) - {dist.group.WORLD}
        destroy_model_parallel()
        state.update({name: None for name, value in state.items() if isinstance(value, dist.ProcessGroup) and value in groups})
        for group in groups & _world.pg_map.keys():
            dist.destroy_process_group(group)

    return destroyed


def _process_groups(values: Iterable[Any]) -> Iterator[dist.ProcessGroup]:
    for value in values:
        if isinstance(value, dist.ProcessGroup):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _process_groups(value)
