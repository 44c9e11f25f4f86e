"""Process groups of gloo that outlive Megatron's model parallelism."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed.distributed_c10d import _world


@contextmanager
def destroyed_after() -> Iterator[None]:
    """Destroy Megatron's process groups after the block, in which it forgets most of them."""
    state = vars(parallel_state)
    groups = set(_process_groups(state.values())) - {dist.group.WORLD}
    yield
    state.update({name: None for name, value in state.items() if isinstance(value, dist.ProcessGroup) and value in groups})
    for group in groups & _world.pg_map.keys():
        dist.destroy_process_group(group)


def _process_groups(values: Iterable[Any]) -> Iterator[dist.ProcessGroup]:
    for value in values:
        if isinstance(value, dist.ProcessGroup):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _process_groups(value)
