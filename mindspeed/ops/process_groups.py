"""Process groups of operators that communicate: an operator's schema names the group, its kernel looks it up.

Partial sums travel as they were accumulated, wide; each result is rounded once, after the sum over ranks. What is posted
takes the group itself, and is waited for later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from mindspeed.ops.errors import require

Group: TypeAlias = dist.ProcessGroup | str
"""A process group, or the name that torch gave it."""


def name_of(op: str, group: Group | None) -> str:
    """The name of a group. Raises OperatorError when it is no group that this process is in."""
    name = group if isinstance(group, str) else getattr(group, "group_name", None)
    require(isinstance(name, str), op, f"{group} is not a process group of this process")
    return str(name)


def group_of_name(name: str) -> dist.ProcessGroup:
    """Return the group that torch gave a name in this process."""
    group: dist.ProcessGroup = getattr(distributed_c10d, "_resolve_process_group")(name)  # noqa: B009  private, untyped
    return group


def size_of(group: Group) -> int:
    """Ranks of a group."""
    # asked of the object where there is one: looking up a name is a graph break under torch.compile
    return dist.get_world_size(group_of_name(group)) if isinstance(group, str) else group.size()


def hccl_name(group: str) -> str:
    """Name of the communicator behind a group on NPU, which products fused with a collective take."""
    name: str = group_of_name(group)._get_backend(torch.device("npu")).get_hccl_comm_name(dist.get_rank())  # type: ignore[attr-defined]
    return name


def name_of_size(op: str, group: Group, size: int) -> str:
    """The name of a group. Raises OperatorError unless it has ``size`` ranks."""
    name = name_of(op, group)
    require(size_of(group) == size, op, f"the group {name} has {size_of(group)} ranks, but {size} are needed")
    return name


def all_reduce(x: Tensor, name: str) -> Tensor:
    """The sum over the group."""
    x = x.contiguous()
    dist.all_reduce(x, group=group_of_name(name))
    return x


def all_gather(x: Tensor, name: str) -> Tensor:
    """Gather the tensors of all ranks as [ranks, ...]."""
    whole = x.new_empty((size_of(name), *x.shape))
    dist.all_gather_into_tensor(whole.flatten(0, 1) if x.dim() else whole, x.contiguous(), group=group_of_name(name))
    return whole


def reduce_scatter(x: Tensor, name: str) -> Tensor:
    """The sum over the group of this rank's part of ``x`` [ranks, ...]."""
    part = x.new_empty(x.shape[1:])
    dist.reduce_scatter_tensor(part, x.contiguous().flatten(0, 1), group=group_of_name(name))
    return part


def all_to_all(x: Tensor, name: str) -> Tensor:
    """``x`` [ranks, ...] with the part that each rank sent to this one in the place of the part that went there."""
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(result, x.contiguous(), group=group_of_name(name))
    return result


@dataclass(slots=True)
class PendingCollective:
    """A collective that was posted. ``received`` must not be read, and what was sent not be changed, before `wait`."""

    received: Tensor
    _sent: Tensor | None = None
    _works: Sequence[dist.Work] = ()

    def wait(self) -> Tensor:
        """Return the received tensor, after waiting for it. Later calls return at once."""
        works, self._works = self._works, ()
        for work in works:
            work.wait()
        self._sent = None
        return self.received


def post_all_to_all(
    group: dist.ProcessGroup, rows: Tensor, sent: Sequence[int] | None = None, received: Sequence[int] | None = None
) -> PendingCollective:
    """Post ``sent[r]`` rows to rank r of the group, to receive ``received[r]`` from it; equally many for all if not given."""
    rows = rows.contiguous()
    arriving = rows.new_empty((len(rows) if received is None else sum(received), *rows.shape[1:]))
    arriving_splits, sent_splits = (None if numbers is None else list(numbers) for numbers in (received, sent))
    work = dist.all_to_all_single(arriving, rows, arriving_splits, sent_splits, group=group, async_op=True)
    return PendingCollective(arriving, rows, [work])


def post_all_gather(group: dist.ProcessGroup, rows: Tensor) -> PendingCollective:
    """Post the rows of this rank to all; they arrive in order of rank."""
    rows, arriving = rows.contiguous(), rows.new_empty((rows.shape[0] * group.size(), *rows.shape[1:]))
    return PendingCollective(arriving, rows, [dist.all_gather_into_tensor(arriving, rows, group=group, async_op=True)])


def post_reduce_scatter(group: dist.ProcessGroup, rows: Tensor) -> PendingCollective:
    """Post rows for every rank; this rank's share arrives, summed over the ranks."""
    rows, arriving = rows.contiguous(), rows.new_empty((rows.shape[0] // group.size(), *rows.shape[1:]))
    return PendingCollective(arriving, rows, [dist.reduce_scatter_tensor(arriving, rows, group=group, async_op=True)])


def post_all_reduce(group: dist.ProcessGroup, rows: Tensor) -> PendingCollective:
    """Post rows to be summed over the ranks, in place."""
    return PendingCollective(rows, None, [dist.all_reduce(rows, group=group, async_op=True)])
