"""Names of communicators, in place of those that HCCL would give on a machine with NPUs."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from mindspeed.ops import process_groups


class Communicator:
    """What torch_npu asks for the name of a group's communicator, with the global rank of this process."""

    def __init__(self, group: str) -> None:
        self._group = group

    def get_hccl_comm_name(self, rank: int) -> str:
        return f"{self._group} of rank {rank}"


def group_of(hcom: str) -> str:
    """The group of a communicator, by the name that torch gave it."""
    group, _, rank = hcom.partition(" of rank ")
    assert int(rank) == dist.get_rank()
    return group


@contextmanager
def communicators() -> Iterator[None]:
    """Every group has a communicator on NPU, as far as torch_npu is loaded and torch knows that device."""
    real = dist.ProcessGroup._get_backend
    dist.ProcessGroup._get_backend = lambda group, device: Communicator(group.group_name)  # type: ignore[method-assign]
    try:
        yield
    finally:
        dist.ProcessGroup._get_backend = real  # type: ignore[method-assign]


@contextmanager
def names() -> Iterator[None]:
    """The same names where torch does not know the device."""
    real = process_groups.hccl_name
    process_groups.hccl_name = lambda group: Communicator(group).get_hccl_comm_name(dist.get_rank())
    try:
        yield
    finally:
        process_groups.hccl_name = real
