"""What the tests of policies for backward run on every rank."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed.context_parallel.layout import Layout
from mindspeed.platforms.collectives import traffic
from tests.context_parallel.shards import function_of

Run = tuple[list[Tensor], dict[str, int], dict[str, int], int]
"""One call: result and gradients, bytes given to each kind of collective in forward and in backward, and bytes kept."""


def runs(name: str, layout: Layout, tensors: Sequence[Tensor], policies: Sequence[dict[str, Any]]) -> list[Run]:
    """A call for each policy with this rank's share of query, key, value and gradient, all from one random state."""
    return [_run(function_of(name), layout, tensors, keywords) for keywords in policies]


def _run(function: Any, layout: Layout, tensors: Sequence[Tensor], keywords: dict[str, Any]) -> Run:
    *inputs, dout = (layout.take(x, dist.get_rank()).clone() for x in tensors)
    q, k, v = (x.requires_grad_() for x in inputs)
    storages: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    torch.manual_seed(5)
    with traffic() as forward, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = function(q, k, v, dist.group.WORLD, **keywords)
    with traffic() as backward:
        out.backward(dout)
    sent = [{kind: counted.total(kind).bytes for kind, _ in counted} for counted in (forward, backward)]
    gradients = [x.grad for x in (q, k, v) if x.grad is not None]
    return [out.detach(), *gradients], sent[0], sent[1], sum(storages.values())
