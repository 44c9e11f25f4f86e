"""Faults of communication to plant in a layer: each runs on gloo, and hangs or fails on NCCL and HCCL."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.plugins import MindSpeedError
from mindspeed.plugins.patches import Function, wrapper

LIMIT = 2.0
"""Seconds after which a fault is reported at the latest."""


def order_of_two_groups(rank: int, hidden: torch.Tensor) -> None:
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    works = [dist.all_reduce(hidden.detach().clone(), group=group, async_op=True) for group in groups[:: 1 - 2 * rank]]
    for work in works:
        work.wait()


def receive_ahead_of_a_send(rank: int, hidden: torch.Tensor) -> None:
    arriving = torch.empty_like(hidden)
    if rank == 0:
        posted = dist.irecv(arriving, 1)
        dist.isend(hidden.detach(), 1)
        posted.wait()
    else:
        dist.recv(arriving, 0)
        dist.send(hidden.detach(), 0)


def host_block_in_creation(rank: int, hidden: torch.Tensor) -> None:
    up, down = dist.new_group([0, 1]), dist.new_group([0, 1])
    posted = dist.irecv(torch.empty_like(hidden), 1 - rank, group=(down, up)[rank])
    dist.isend(hidden.detach(), 1 - rank, group=(up, down)[rank])
    posted.wait()


def unequal_collective_order(rank: int, hidden: torch.Tensor) -> None:
    values = hidden.detach().clone()
    works = [dist.all_reduce(values, async_op=True)] if rank == 0 else [dist.broadcast(values, 0, async_op=True)]
    works += [dist.broadcast(values, 0, async_op=True)] if rank == 0 else [dist.all_reduce(values, async_op=True)]
    for work in works:
        work.wait()


def host_read(rank: int, hidden: torch.Tensor) -> None:
    float(hidden.detach().abs().max())


def refused_type(rank: int, hidden: torch.Tensor) -> None:
    dist.all_reduce(hidden.detach().to(torch.int16))


def _in_a_layer(fault: Callable[[int, torch.Tensor], None]) -> Callable[[Function], Function]:
    @wrapper
    def faulty(original: Function, *args: Any, **kwargs: Any) -> Any:
        hidden = args[1] if len(args) > 1 else kwargs["hidden_states"]
        start = time.monotonic()
        try:
            fault(dist.get_rank(), hidden)
        except MindSpeedError:
            if (seconds := time.monotonic() - start) > LIMIT:
                raise AssertionError(f"reported after {seconds:.1f} s") from None
            raise
        return original(*args, **kwargs)

    return faulty


two_groups = _in_a_layer(order_of_two_groups)
receive_ahead = _in_a_layer(receive_ahead_of_a_send)
creation = _in_a_layer(host_block_in_creation)
collective_order = _in_a_layer(unequal_collective_order)
read = _in_a_layer(host_read)
refused = _in_a_layer(refused_type)
