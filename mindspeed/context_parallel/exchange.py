"""Sending a tensor to one rank while receiving as much, posted early and waited for late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed.ops.process_groups import PendingCollective


@dataclass(frozen=True, slots=True)
class Exchange:
    """Posts exchanges in a process group. With ``second``, a group of the same ranks, the two directions of a rank are on
    different communicators, for backends that run the transfers of one communicator one after the other."""

    group: dist.ProcessGroup
    second: dist.ProcessGroup | None = None

    def post(self, sent: Tensor, to: int, source: int) -> PendingCollective:
        """Send to rank ``to`` of the group and receive as much from rank ``source``."""
        received = torch.empty_like(sent)
        here, there = self._group(self.group.rank()), self._group(source)
        send = dist.P2POp(dist.isend, sent, group=here, group_peer=to)
        receive = dist.P2POp(dist.irecv, received, group=there, group_peer=source)
        if here is there:
            return PendingCollective(received, sent, dist.batch_isend_irecv([send, receive]))
        ordered = [send, receive] if here is self.group else [receive, send]
        return PendingCollective(received, sent, [work for one in ordered for work in dist.batch_isend_irecv([one])])

    def _group(self, sender: int) -> dist.ProcessGroup:
        """The communicator of what ``sender`` sends."""
        return self.second if self.second is not None and sender % 2 else self.group


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Pack several tensors of one type into one message."""
    return torch.cat([x.reshape(-1) for x in tensors])


def unpack(message: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of a message, shaped like the tensors that it was packed from."""
    return [part.view(x.shape) for part, x in zip(torch.split(message, [x.numel() for x in like]), like, strict=True)]
