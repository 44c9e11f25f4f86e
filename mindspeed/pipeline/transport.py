"""Tensors between the ranks of a pipeline: receives are posted ahead in the order of the sender, no send is waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from mindspeed.pipeline.messages import CHANNELS, Channel, Message, Routes, channels, independent
from mindspeed.pipeline.operations import Placement

_HEADER: Final = 8
"""Numbers of a header: the dimensions of a tensor, then their sizes."""


class Links(NamedTuple):
    """Communicators between the ranks of a pipeline: ``ranks`` of the job, and a process group for each channel."""

    ranks: tuple[int, ...]
    groups: dict[Channel, Any]

    def destroy(self) -> None:
        for group in dict.fromkeys(self.groups.values()):
            dist.destroy_process_group(group)


def open_links(group: Any, vpp: int, placement: Placement, empty: Callable[..., Tensor]) -> Links:
    """Create the communicators between the ranks of a pipeline group; collective over all ranks of the job.

    ``empty`` is that of `Channels`.

    NCCL and HCCL create a communicator at its first message and block both hosts meanwhile. So a message is sent on every
    channel here, in an order that is equal on all ranks.
    """
    own = tuple(dist.get_process_group_ranks(group))
    pipelines: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pipelines, own)
    links, rank = Links(own, {}), own.index(dist.get_rank())
    first = empty(1)
    for number, chosen in enumerate(independent(channels(len(own), vpp, placement))):
        members = sorted({rank for channel in chosen for rank in channel})
        # not by the members alone: torch names such a group by the number of groups of a rank, in which stages differ
        made = {
            ranks: dist.new_group([ranks[member] for member in members], group_desc=f"{CHANNELS}_{number}")
            for ranks in sorted(set(pipelines))
        }
        for sender, target in chosen:
            if rank == sender:
                dist.send(first, own[target], group=made[own])
            elif rank == target:
                dist.recv(first, own[sender], group=made[own])
            else:
                continue
            links.groups[sender, target] = made[own]
    return links


def moved(data: Any, links: Links, rank: int, source: int, target: int, device: Any) -> Any:
    """Return on the rank ``target`` the data of the rank ``source``, tensors in them on the device, and elsewhere None."""
    if rank == source:
        dist.send_object_list(
            [tree_map_only(Tensor, Tensor.cpu, data)], links.ranks[target], group=links.groups[source, target]
        )
    if rank != target:
        return None
    box = [None]
    dist.recv_object_list(box, links.ranks[source], group=links.groups[source, target])
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), box[0])


class _Posted(NamedTuple):
    tensor: Tensor
    work: Any


class Channels:
    """The messages of one rank in one pass over a schedule.

    ``buffer()`` makes the tensor that a message is received in; None takes its shape from a header. ``empty`` is torch.empty on
    the device and in the type of the messages.
    Messages of one channel match by their order, so that no tags are needed. A send is waited for when a later message
    shows that its receiver has consumed it: earlier, two ranks could wait for one another.
    """

    def __init__(
        self, routes: Routes, rank: int, links: Links, buffer: Callable[[], Tensor | None], empty: Callable[..., Tensor]
    ):
        self._routes, self._rank, self._links, self._buffer, self._empty = routes, rank, links, buffer, empty
        self._headed = buffer() is None
        self._source, self._target = routes.sources(rank), routes.targets(rank)
        self._place = {message: place for order in routes.order.values() for place, message in enumerate(order)}
        self._posted: dict[Message, _Posted] = {}
        self._headers: dict[Message, _Posted] = {}
        self._next: dict[int, int] = {}
        self._sent: dict[int, deque[tuple[int, Callable[[], None]]]] = {}
        self._count: dict[int, int] = {}
        self.bytes_sent = 0
        for source in set(self._source.values()):
            self._post(source)

    def receive(self, message: Message) -> Tensor:
        """Return the tensor of a message; the receive of the one after it is posted."""
        source = self._source[message]
        while message not in self._posted:
            self._post(source, needed=True)
        tensor, work = self._posted.pop(message)
        work.wait()
        channel = (source, self._rank)
        self._release(source, self._routes.consumed[channel][self._place[message]])
        self._post(source)
        return tensor

    def send(self, message: Message, tensor: Tensor, consumed: Callable[[], None]) -> None:
        """Start to send a tensor. ``consumed`` is called when its contents may go."""
        target = self._target[message]
        channel = (self._rank, target)
        peer = self._links.ranks[target]
        tensor = tensor.detach().contiguous()
        works: list[tuple[Any, Tensor]] = []
        if self._headed:
            header = torch.tensor([tensor.dim(), *tensor.shape] + [0] * (_HEADER - 1 - tensor.dim()), device=tensor.device)
            works.append((dist.isend(header, peer, group=self._links.groups[channel]), header))
        works.append((dist.isend(tensor, peer, group=self._links.groups[channel]), tensor))
        self.bytes_sent += tensor.nbytes

        def finish() -> None:
            for work, _ in works:
                work.wait()
            consumed()

        place = self._count.get(target, 0)
        self._count[target] = place + 1
        self._sent.setdefault(target, deque()).append((place, finish))

    def finish(self) -> None:
        """Wait for the sends that are left; every rank has run its list."""
        for target in self._sent:
            self._release(target, self._count[target])

    def restart(self, sent: Mapping[Channel, int]) -> None:
        """Receive what other ranks have ``sent`` of the first messages of their lists, and begin all lists again.

        The receive that was posted for the message behind those takes the first one.
        """
        for source in set(self._source.values()):
            order, count = self._routes.order[source, self._rank], sent.get((source, self._rank), 0)
            for place, message in enumerate(order[:count]):
                if message in self._posted or place >= self._next.get(source, 0):
                    self.receive(message)
            self._next[source] = 0
            for posted, ahead in ((self._posted, 1), (self._headers, 0)):
                if count < len(order) and order[count] in posted:
                    posted[order[0]] = posted.pop(order[count])
                    self._next[source] = ahead
            if not {order[0]} & {*self._posted, *self._headers}:
                self._post(source)
        self.finish()
        self._count.clear()

    def _release(self, target: int, count: int) -> None:
        sent = self._sent.get(target, deque())
        while sent and sent[0][0] < count:
            sent.popleft()[1]()

    def _post(self, source: int, needed: bool = False) -> None:
        """Post the next receive from a rank, if there is one left.

        Where headers tell the shapes, a message that is not ``needed`` yet has only its header received: to wait for that here
        could be to wait for this rank's own next operation.
        """
        channel = (source, self._rank)
        place = self._next.get(source, 0)
        order: Sequence[Message] = self._routes.order[channel]
        if place >= len(order):
            return
        message = order[place]
        peer = self._links.ranks[source]
        tensor = self._buffer()
        if tensor is None:
            if message not in self._headers:
                header = self._empty(_HEADER, dtype=torch.int64)
                self._headers[message] = _Posted(header, dist.irecv(header, peer, group=self._links.groups[channel]))
            if not needed:
                return
            header, work = self._headers.pop(message)
            work.wait()
            dimensions, *sizes = header.tolist()
            tensor = self._empty(sizes[:dimensions])
        self._next[source] = place + 1
        self._posted[message] = _Posted(tensor, dist.irecv(tensor, peer, group=self._links.groups[channel]))
