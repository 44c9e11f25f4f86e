"""Shards of host memory sent to the first rank of a group and back, a slice at a time through device memory. Plain torch.

Slices travel point to point, so a backend needs neither gather nor scatter. The first rank has a device buffer of a slice
for every other rank, and every other rank has one.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor


def gather(shard: Tensor, whole: Tensor | None, group: dist.ProcessGroup, size: int, device: torch.device) -> None:
    """Fill ``whole`` on the first rank with the shards of all, by rank.

    ``shard`` [n] is in host memory and of one length on every rank. ``whole`` has at most n elements for each rank; what is
    beyond its end is padding. ``size`` are the elements of a slice.
    """
    buffers = _buffers(shard, group, size, device)
    for start, count in _slices(len(shard), size):
        if whole is None:
            buffers[0][:count].copy_(shard[start : start + count])
            _exchange([dist.P2POp(dist.isend, buffers[0][:count], _global(group, 0), group)])
            continue
        peers = range(1, group.size())
        _exchange([dist.P2POp(dist.irecv, buffers[p - 1][:count], _global(group, p), group) for p in peers])
        for part, source in zip(
            _parts(whole, shard, start, count, group), [shard[start : start + count], *buffers], strict=True
        ):
            part.copy_(source[: len(part)])


def scatter(whole: Tensor | None, shard: Tensor, group: dist.ProcessGroup, size: int, device: torch.device) -> None:
    """Fill the shard of every rank from ``whole`` on the first one: the reverse of `gather`. Padding is zero."""
    buffers = _buffers(shard, group, size, device)
    for start, count in _slices(len(shard), size):
        target = shard[start : start + count]
        if whole is None:
            _exchange([dist.P2POp(dist.irecv, buffers[0][:count], _global(group, 0), group)])
            target.copy_(buffers[0][:count])
            continue
        for part, buffer in zip(_parts(whole, shard, start, count, group), [target, *buffers], strict=True):
            buffer[: len(part)].copy_(part)
            buffer[len(part) : count].zero_()
        peers = range(1, group.size())
        _exchange([dist.P2POp(dist.isend, buffers[p - 1][:count], _global(group, p), group) for p in peers])


def _buffers(shard: Tensor, group: dist.ProcessGroup, size: int, device: torch.device) -> list[Tensor]:
    """Allocate a device buffer for each peer: all other ranks on the first rank, the first rank alone on the others."""
    count = group.size() - 1 if group.rank() == 0 else 1
    return [torch.empty(min(size, len(shard)), dtype=shard.dtype, device=device) for _ in range(count)]


def _slices(length: int, size: int) -> Iterator[tuple[int, int]]:
    """Start and length of every slice."""
    return ((start, min(size, length - start)) for start in range(0, length, size))


def _parts(whole: Tensor, shard: Tensor, start: int, count: int, group: dist.ProcessGroup) -> list[Tensor]:
    """The places of one slice of each rank in ``whole``, shorter or empty where it ends in padding."""
    starts = [rank * len(shard) + start for rank in range(group.size())]
    return [whole[min(first, len(whole)) : first + count] for first in starts]


def _global(group: dist.ProcessGroup, rank: int) -> int:
    return dist.get_global_rank(group, rank)


def _exchange(operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
