"""Reduce-scatter on gloo that sends each rank its part and nothing else.

gloo sums everything on every rank and keeps a part, which is twice the bytes. Here parts are exchanged and reduced where
they arrive, in the order in which gloo's ring does it, so the result is the same to the bit: part r is
``((x[r-1] op x[r-2]) op ... x[r+1]) op x[r]``, ranks counted around the ring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import ReduceOp
from torch.utils._python_dispatch import _disable_current_modes

from mindspeed.plugins.patches import Function, wrapper

_COMBINE: Final[dict[Any, Callable[..., Tensor]]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
}
_FLOATS: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTEGERS: Final = (torch.int64, torch.int32, torch.int8, torch.uint8)

_coalesced: dict[Any, list[FutureWork]] = {}


class FutureWork:
    """Handle of collectives in flight, whose outputs are complete when a future completes."""

    def __init__(self, future: Any) -> None:
        self._future = future

    def wait(self, timeout: Any = None) -> bool:
        """Wait until the output is complete. Raises what the transport raised, which a handle made by torch would swallow."""
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        return bool(self._future.done())

    def get_future(self) -> Any:
        return self._future


def collect(futures: Sequence[Any]) -> FutureWork:
    """Combine several collectives in one handle, which raises what any of them raises."""
    return FutureWork(torch.futures.collect_all(list(futures)).then(lambda done: [future.value() for future in done.value()]))


def finish(work: FutureWork, async_op: bool) -> FutureWork | None:
    """Return the handle to a caller of an asynchronous call; wait for any other."""
    if async_op:
        return work
    work.wait()
    return None


@wrapper
def scatter_parts(reduce_scatter: Function, *args: Any, **kwargs: Any) -> Any:
    """``reduce_scatter`` and its spellings; parts may differ in shape, as for nccl."""
    bound = signature(reduce_scatter).bind(*args, **kwargs)
    bound.apply_defaults()
    output, parts, op, group, async_op = bound.arguments.values()
    group, op = group or distributed_c10d.GroupMember.WORLD, getattr(op, "op", op)
    coalescing = group in distributed_c10d._world.pg_coalesce_state
    if not _known(output, parts, op, group) or (coalescing and group not in _coalesced):
        return reduce_scatter(*args, **kwargs)
    work = _begin(output, parts, op, group)
    if coalescing:
        _coalesced[group].append(work)
        return distributed_c10d._IllegalWork() if async_op else None
    return finish(work, async_op)


@wrapper
@contextmanager
def coalesce(manager: Function, *args: Any, **kwargs: Any) -> Iterator[Any]:
    """``_coalescing_manager``: reduce-scatters begin at once and are waited for together."""
    arguments = signature(manager).bind(*args, **kwargs).arguments
    group = arguments.get("group") or distributed_c10d.GroupMember.WORLD
    with manager(*args, **kwargs) as coalesced:
        begun = _coalesced[group] = []
        try:
            yield coalesced
        finally:
            del _coalesced[group]
    if begun and (work := finish(collect([work.get_future() for work in begun]), arguments.get("async_ops", False))):
        coalesced.append(work)


def _known(output: Any, parts: Any, op: Any, group: Any) -> bool:
    """Return whether this is a reduction that is done here. Everything else, errors included, is left to torch."""
    ours = isinstance(group, distributed_c10d.ProcessGroup) and group.size() > 1
    if not ours or distributed_c10d.get_backend(group) != "gloo" or op not in _COMBINE:
        return False
    whole = isinstance(parts, Tensor)
    if not all(isinstance(x, Tensor) and x.dtype is output.dtype for x in (output, *([parts] if whole else parts))):
        return False
    if whole:
        fits = parts.numel() == group.size() * output.numel()
    else:
        fits = len(parts) == group.size() and parts[group.rank()].numel() == output.numel()
    return fits and output.dtype in (_FLOATS if op == ReduceOp.AVG else (*_FLOATS, *_INTEGERS))


def _begin(output: Tensor, parts: Any, op: Any, group: Any) -> FutureWork:
    """Send every rank its part; what arrives is reduced by the thread that receives the last of it."""
    whole = isinstance(parts, Tensor)
    sent = (parts if whole else torch.cat([part.reshape(-1) for part in parts])).data.contiguous().view(-1)
    ranks, rank = group.size(), group.rank()
    arrived = sent.new_empty((ranks, output.numel()))
    sizes = [] if whole else [part.numel() for part in parts]
    work = group.alltoall_base(arrived.view(-1), sent, [output.numel()] * len(sizes), sizes)

    def reduce(future: Any) -> list[Tensor]:
        future.value()  # raises where the exchange failed
        combine, (first, *rest) = _COMBINE[op], [arrived[(rank - n) % ranks] for n in range(1, ranks + 1)]
        made_for_inference = output.is_inference() or arrived.is_inference()  # which this thread does not know
        with torch.inference_mode(made_for_inference), torch.no_grad(), _disable_current_modes():
            for row in rest:
                combine(first, row, out=first)
            if op == ReduceOp.AVG:
                first.div_(ranks)
            output.data.copy_(first.view(output.shape))
        return [output]

    return FutureWork(work.get_future().then(reduce))
