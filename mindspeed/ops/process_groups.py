"""Process groups of operators that communicate: an operator's schema names the group, its kernel looks it up.

Partial sums travel as they were accumulated, wide; each result is rounded once, after the sum over ranks.
"""

from __future__ import annotations

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
    require(isinstance(name, str), op, f"{group} is not a process group that this process is in")
    return str(name)


def _group(name: str) -> dist.ProcessGroup:
    group: dist.ProcessGroup = getattr(distributed_c10d, "_resolve_process_group")(name)  # noqa: B009  private, untyped
    return group


def size_of(group: Group) -> int:
    """Ranks of a group."""
    # asked of the object where there is one: looking up a name is a graph break under torch.compile
    return dist.get_world_size(_group(group)) if isinstance(group, str) else group.size()


def hccl_name(group: str) -> str:
    """Name of the communicator behind a group on NPU, which products fused with a collective take."""
    name: str = _group(group)._get_backend(torch.device("npu")).get_hccl_comm_name(dist.get_rank())  # type: ignore[attr-defined]
    return name


def require_size(op: str, group: Group, size: int) -> None:
    """Raise OperatorError unless the group has ``size`` ranks."""
    require(size_of(group) == size, op, f"the group {name_of(op, group)} has {size_of(group)} ranks, not {size}")


def all_reduce(x: Tensor, name: str) -> Tensor:
    """The sum over the group."""
    x = x.contiguous()
    dist.all_reduce(x, group=_group(name))
    return x


def all_gather(x: Tensor, name: str) -> Tensor:
    """Gather the tensors of all ranks as [ranks, ...]."""
    whole = x.new_empty((size_of(name), *x.shape))
    dist.all_gather_into_tensor(whole.flatten(0, 1) if x.dim() else whole, x.contiguous(), group=_group(name))
    return whole


def reduce_scatter(x: Tensor, name: str) -> Tensor:
    """The sum over the group of this rank's part of ``x`` [ranks, ...]."""
    part = x.new_empty(x.shape[1:])
    dist.reduce_scatter_tensor(part, x.contiguous().flatten(0, 1), group=_group(name))
    return part


def all_to_all(x: Tensor, name: str) -> Tensor:
    """``x`` [ranks, ...] with the part that each rank sent to this one in the place of the part that went there."""
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(result, x.contiguous(), group=_group(name))
    return result
