"""Process groups on the CPU: a request for nccl gets gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import (
    BroadcastOptions,
    GroupMember,
    ProcessGroup,
    ReduceOp,
    get_backend,
    is_initialized,
)
from torch.utils._python_dispatch import _disable_current_modes

from mindspeed.platforms.cpu_tensors import is_device
from mindspeed.plugins.wrapping import Function, wrapper

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


def is_nccl_available() -> bool:
    return True


@wrapper
def use_gloo(create: Function, *args: Any, **kwargs: Any) -> Any:
    """``init_process_group`` and ``new_group``: options made for nccl and device ids are dropped with it."""
    arguments = signature(create).bind(*args, **kwargs).arguments
    backend = arguments.get("backend")
    if is_initialized() and get_backend() == "fake":
        backend = arguments["backend"] = "fake"  # of one process that stands for a rank of any world
    if backend is not None and "nccl" in str(backend).lower():
        arguments.pop("pg_options", None)
    if backend is not None or create.__name__ == "init_process_group":
        arguments["backend"] = _gloo(backend)
    arguments.pop("device_id", None)
    return create(**arguments)


@wrapper
def mesh_on_cpu(create: Function, *args: Any, **kwargs: Any) -> Any:
    """``init_device_mesh`` and ``DeviceMesh.__init__``."""
    bound = signature(create).bind(*args, **kwargs)
    if is_device(bound.arguments["device_type"]):
        bound.arguments["device_type"] = "cpu"
        bound.arguments.pop("backend_override", None)
    return create(*bound.args, **bound.kwargs)


@wrapper
def any_device(barrier: Function, group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
    """``barrier``, whose device ids gloo refuses."""
    return barrier(group, async_op)


@wrapper
def keep_storage(isend: Function, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """``isend`` of a detached tensor: its storage outlives ``tensor.data = ...`` while gloo still reads it."""
    return isend(tensor.detach(), *args, **kwargs)


@wrapper
def gather_uneven(all_gather: Function, tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
    """``all_gather`` of shapes that differ between ranks, which nccl takes and gloo does not: one broadcast per rank."""
    if all(part.shape == tensor_list[0].shape for part in tensor_list):
        return all_gather(tensor_list, tensor, group, async_op)
    group = group or GroupMember.WORLD
    tensor_list[group.rank()].copy_(tensor)
    futures = []
    for root, part in enumerate(tensor_list):
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        futures.append(group.broadcast([part], options).get_future())
    return finish(collect(futures), async_op)


@wrapper
def exchange_uneven(
    all_to_all: Function, output_tensor_list: Any, input_tensor_list: Any, group: Any = None, async_op: bool = False
) -> Any:
    """``all_to_all`` of shapes that differ, which nccl takes and gloo does not: one exchange of all elements.

    A rank cannot see the shapes of the others, so equal ones go the same way.
    """
    group = group or GroupMember.WORLD
    if not isinstance(group, ProcessGroup) or get_backend(group) != "gloo":
        return all_to_all(output_tensor_list, input_tensor_list, group, async_op)
    sent = torch.cat([part.detach().reshape(-1) for part in input_tensor_list])
    sizes = [part.numel() for part in output_tensor_list]
    arrived = sent.new_empty(sum(sizes))
    work = group.alltoall_base(arrived, sent, sizes, [part.numel() for part in input_tensor_list])

    def unpack(future: Any) -> Any:
        future.value()  # raises where the exchange failed
        with torch.inference_mode(arrived.is_inference()), torch.no_grad(), _disable_current_modes():
            for output, part in zip(output_tensor_list, torch.split(arrived, sizes), strict=True):
                output.data.copy_(part.view(output.shape))
        return output_tensor_list

    return finish(FutureWork(work.get_future().then(unpack)), async_op)


@wrapper
def gather_by_size(
    all_gather: Function, output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False
) -> Any:
    """``all_gather_into_tensor``: NCCL checks the number of elements, gloo also requires matching shapes."""
    if output_tensor.shape[1:] != input_tensor.shape[1:] and output_tensor.is_contiguous():
        output_tensor, input_tensor = output_tensor.view(-1), input_tensor.reshape(-1)
    return all_gather(output_tensor, input_tensor, group, async_op)


@wrapper
def premultiply(reduction: Function, *args: Any, **kwargs: Any) -> Any:
    """A reduction with ``ReduceOp.PREMUL_SUM``, which gloo does not support: scale the input, then sum."""
    ops: list[Any] = [value for value in (*args, *kwargs.values()) if isinstance(value, ReduceOp)]
    if ReduceOp.PREMUL_SUM not in ops:
        return reduction(*args, **kwargs)
    arguments = signature(reduction).bind(*args, **kwargs).arguments
    _, factor = arguments["op"].__getstate__()
    arguments["op"] = ReduceOp.SUM
    with torch.no_grad():
        for name, value in arguments.items():
            if name == "tensor":
                value.mul_(factor)
            elif name == "input":
                arguments[name] = value * factor
            elif name == "input_list":
                arguments[name] = [part * factor for part in value]
    return reduction(**arguments)


def _gloo(backend: Any) -> str:
    """The same request with gloo for nccl: ``"cpu:gloo,cuda:nccl"`` and no request at all are plain gloo."""
    name = str(backend).lower() if backend is not None else "nccl"
    if ":" in name:
        return "gloo" if "nccl" in name else name
    return "gloo" if name in ("nccl", "undefined") else name
