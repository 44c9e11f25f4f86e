"""Reduce-scatter on gloo that sends each rank its part and nothing else.

gloo sums everything on every rank and keeps a part, which is twice the bytes. Here parts are exchanged and reduced where
they arrive, in the order in which gloo's ring does it, so the result is the same to the bit: part r is
``((x[r-1] op x[r-2]) op ... x[r+1]) op x[r]``, ranks counted around the ring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import ReduceOp
from torch.utils._python_dispatch import _disable_current_modes

_COMBINE: Final[dict[Any, Callable[..., Tensor]]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
}
_FLOATS: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTEGERS: Final = (torch.int64, torch.int32, torch.int8, torch.uint8)

_coalesced: dict[Any, list[Reduction]] = {}


class Reduction:
    """Handle of a reduce-scatter in flight; its value is written by whoever completes the future."""

    def __init__(self, future: Any) -> None:
        self._future = future

    def wait(self, timeout: Any = None) -> bool:
        """Wait until the output is there. Raises what the transport raised, which a handle made by torch would swallow."""
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        return bool(self._future.done())

    def get_future(self) -> Any:
        return self._future


def scatter_parts(reduce_scatter: Callable[..., Any]) -> Callable[..., Any]:
    """``reduce_scatter`` and its spellings; parts may differ in shape, as for nccl."""
    parameters = signature(reduce_scatter)

    @wraps(reduce_scatter)
    def scattered(*args: Any, **kwargs: Any) -> Any:
        bound = parameters.bind(*args, **kwargs)
        bound.apply_defaults()
        output, given, op, group, async_op = bound.arguments.values()
        group, op = group or distributed_c10d.GroupMember.WORLD, getattr(op, "op", op)
        coalescing = group in distributed_c10d._world.pg_coalesce_state
        if not _known(output, given, op, group) or (coalescing and group not in _coalesced):
            return reduce_scatter(*args, **kwargs)
        reduction = _begin(output, given, op, group)
        if coalescing:
            _coalesced[group].append(reduction)
            return distributed_c10d._IllegalWork() if async_op else None
        if async_op:
            return reduction
        reduction.wait()
        return None

    return scattered


def coalesce(manager: Callable[..., Any]) -> Callable[..., Any]:
    """``_coalescing_manager``: reduce-scatters begin at once and are waited for together."""
    parameters = signature(manager)

    @wraps(manager)
    @contextmanager
    def grouped(*args: Any, **kwargs: Any) -> Iterator[Any]:
        given = parameters.bind(*args, **kwargs).arguments
        group = given.get("group") or distributed_c10d.GroupMember.WORLD
        with manager(*args, **kwargs) as held:
            begun = _coalesced[group] = []
            try:
                yield held
            finally:
                del _coalesced[group]
        if begun:
            together = Reduction(torch.futures.collect_all([one.get_future() for one in begun]).then(_all_values))
            if given.get("async_ops"):
                held.append(together)
            else:
                together.wait()

    return grouped


def _known(output: Any, given: Any, op: Any, group: Any) -> bool:
    """Return whether this is a reduction that is done here. Everything else, errors included, is left to torch."""
    parts = [given] if isinstance(given, Tensor) else given
    ours = isinstance(group, distributed_c10d.ProcessGroup) and group.size() > 1
    if not ours or distributed_c10d.get_backend(group) != "gloo" or op not in _COMBINE:
        return False
    if not all(isinstance(x, Tensor) and x.dtype is output.dtype for x in (output, *parts)):
        return False
    if isinstance(given, Tensor):
        fits = given.numel() == group.size() * output.numel()
    else:
        fits = len(parts) == group.size() and parts[group.rank()].numel() == output.numel()
    return fits and output.dtype in (_FLOATS if op == ReduceOp.AVG else (*_FLOATS, *_INTEGERS))


def _begin(output: Tensor, given: Tensor | Sequence[Tensor], op: Any, group: Any) -> Reduction:
    """Send every rank its part; what arrives is reduced by the thread that receives the last of it."""
    one = isinstance(given, Tensor)
    sent = (given if isinstance(given, Tensor) else torch.cat([x.reshape(-1) for x in given])).data.contiguous().view(-1)
    ranks, rank = group.size(), group.rank()
    arrived = sent.new_empty((ranks, output.numel()))
    sizes = [] if one else [x.numel() for x in given]
    work = group.alltoall_base(arrived.view(-1), sent, [output.numel()] * len(sizes), sizes)

    def reduce(future: Any) -> list[Tensor]:
        future.value()  # raises where the exchange failed
        combine, (first, *rest) = _COMBINE[op], [arrived[(rank - n) % ranks] for n in range(1, ranks + 1)]
        with torch.no_grad(), _disable_current_modes():
            for row in rest:
                combine(first, row, out=first)
            if op == ReduceOp.AVG:
                first.div_(ranks)
            output.data.copy_(first.view(output.shape))
        return [output]

    return Reduction(work.get_future().then(reduce))


def _all_values(collected: Any) -> list[Any]:
    """The values of all futures; raises what any of them raises."""
    return [future.value() for future in collected.value()]
