"""Process groups on the CPU: a request for nccl gets gloo."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch.distributed.distributed_c10d import (
    BroadcastOptions,
    GroupMember,
    ProcessGroup,
    ReduceOp,
    get_backend,
    is_initialized,
)
from torch.utils._python_dispatch import _disable_current_modes

from mindspeed.platforms.cpu_reduce_scatter import FutureWork, collect, finish
from mindspeed.platforms.cpu_tensors import is_device
from mindspeed.plugins.patches import Function, wrapper


def is_nccl_available() -> bool:
    return True


@wrapper
def use_gloo(create: Function, *args: Any, **kwargs: Any) -> Any:
    """``init_process_group`` and ``new_group``: options made for nccl and device ids are dropped with it."""
    arguments = signature(create).bind(*args, **kwargs).arguments
    backend = arguments.get("backend")
    of_nccl = backend is not None and "nccl" in str(backend).lower()
    if is_initialized() and get_backend() == "fake":
        backend, of_nccl = "fake", True  # one process stands for a rank of any world
    if of_nccl:
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
