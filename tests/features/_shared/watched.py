"""What the tests of traffic, overlap and memory run on every rank."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed.features._shared.context_parallel import blocks, exchange, local, ring
from mindspeed.features._shared.context_parallel.layout import Layout
from mindspeed.platforms.collectives import traffic
from tests.features._shared.shards import attend, function_of

DELAY = 0.02
"""Seconds that a transfer takes."""


def bytes_sent(name: str, layout: Layout, tensors: Sequence[Tensor], keywords: dict[str, Any]) -> list[dict[str, int]]:
    """Bytes by kind of collective, in forward and in backward."""
    rank = dist.get_rank()
    *inputs, dout = (layout.take(x, rank).clone() for x in tensors)
    q, k, v = (x.requires_grad_() for x in inputs)
    with traffic() as forward:
        out = function_of(name)(q, k, v, dist.group.WORLD, **keywords)
    with traffic() as backward:
        out.backward(dout)
    return [{kind: counted.total(kind).bytes for kind, _ in counted} for counted in (forward, backward)]


def saved_bytes(name: str, layout: Layout, tensors: Sequence[Tensor], keywords: dict[str, Any]) -> int:
    """Bytes of distinct storages that autograd keeps for backward."""
    rank, kept = dist.get_rank(), {}
    q, k, v = (layout.take(x, rank).clone().requires_grad_() for x in tensors[:3])

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        function_of(name)(q, k, v, dist.group.WORLD, **keywords)
    return sum(kept.values())


def delayed(name: str, layout: Layout, tensors: Sequence[Tensor], early: bool) -> dict[str, Any]:
    """Seconds of forward and backward over a transport whose transfers take DELAY, with blocks that take as long.

    Without ``early`` a transfer begins when it is waited for. Also the most received blocks alive at once.
    """
    alive: list[weakref.ref[Tensor]] = []
    most = 0
    post = exchange.Exchange.post

    class Slow:
        def __init__(self, pending: exchange.Pending) -> None:
            self.pending, self.done = pending, time.perf_counter() + DELAY

        def wait(self) -> Tensor:
            time.sleep(max(0.0, self.done - time.perf_counter()) if early else DELAY)
            return self.pending.wait()

    def slow_post(self: exchange.Exchange, sent: Tensor, to: int, source: int) -> Any:
        nonlocal most
        pending = post(self, sent, to, source)
        alive.append(weakref.ref(pending.received))
        most = max(most, sum(ref() is not None for ref in alive))
        return Slow(pending)

    def slow(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            time.sleep(DELAY)
            return function(*args, **kwargs)

        return call

    kept = (blocks.see, local.gradients, ring.see)
    try:
        exchange.Exchange.post = slow_post  # type: ignore[method-assign, assignment]
        local.gradients, ring.see = slow(local.gradients), slow(ring.see)
        dist.barrier()
        begin = time.perf_counter()
        attend(name, layout, tensors, {})
        return {"seconds": time.perf_counter() - begin, "most": most}
    finally:
        exchange.Exchange.post = post  # type: ignore[method-assign]
        _, local.gradients, ring.see = kept
