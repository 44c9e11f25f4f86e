"""Process groups on the CPU: whoever asks for nccl gets gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch.distributed.distributed_c10d import BroadcastOptions, GroupMember, ReduceOp

from mindspeed.platforms.cpu_tensors import is_device


def is_nccl_available() -> bool:
    return True


def use_gloo(create: Callable[..., Any]) -> Callable[..., Any]:
    """``init_process_group`` and ``new_group``: options made for nccl and device ids are dropped with it."""
    parameters = signature(create)

    @wraps(create)
    def created(*args: Any, **kwargs: Any) -> Any:
        given = parameters.bind(*args, **kwargs).arguments
        backend = given.get("backend")
        if backend is not None and "nccl" in str(backend).lower():
            given.pop("pg_options", None)
        if backend is not None or create.__name__ == "init_process_group":
            given["backend"] = _gloo(backend)
        given.pop("device_id", None)
        return create(**given)

    return created


def mesh_on_cpu(create: Callable[..., Any]) -> Callable[..., Any]:
    """``init_device_mesh`` and ``DeviceMesh.__init__``."""
    parameters = signature(create)

    @wraps(create)
    def created(*args: Any, **kwargs: Any) -> Any:
        bound = parameters.bind(*args, **kwargs)
        if is_device(bound.arguments["device_type"]):
            bound.arguments["device_type"] = "cpu"
            bound.arguments.pop("backend_override", None)
        return create(*bound.args, **bound.kwargs)

    return created


def any_device(barrier: Callable[..., Any]) -> Callable[..., Any]:
    """``barrier``, whose device ids gloo refuses."""

    @wraps(barrier)
    def waited(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return barrier(group, async_op)

    return waited


def keep_storage(isend: Callable[..., Any]) -> Callable[..., Any]:
    """``isend`` of a detached tensor: its storage outlives ``tensor.data = ...`` while gloo still reads it."""

    @wraps(isend)
    def sent(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return isend(tensor.detach(), *args, **kwargs)

    return sent


class Works:
    """Combine several collectives in one handle."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        for work in self._works:
            work.wait(*args, **kwargs)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def gather_uneven(all_gather: Callable[..., Any]) -> Callable[..., Any]:
    """``all_gather`` of shapes that differ between ranks, which nccl takes and gloo does not: one broadcast per rank."""

    @wraps(all_gather)
    def gathered(tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        if _even(tensor_list):
            return all_gather(tensor_list, tensor, group, async_op)
        group = group or GroupMember.WORLD
        tensor_list[group.rank()].copy_(tensor)
        works = []
        for root, part in enumerate(tensor_list):
            options = BroadcastOptions()
            options.rootRank, options.rootTensor = root, 0
            works.append(group.broadcast([part], options))
        return _finish(works, async_op)

    return gathered


def gather_by_size(all_gather: Callable[..., Any]) -> Callable[..., Any]:
    """``all_gather_into_tensor``: nccl asks for the right number of elements, gloo also for fitting shapes."""

    @wraps(all_gather)
    def gathered(output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        if output_tensor.shape[1:] != input_tensor.shape[1:] and output_tensor.is_contiguous():
            output_tensor, input_tensor = output_tensor.view(-1), input_tensor.reshape(-1)
        return all_gather(output_tensor, input_tensor, group, async_op)

    return gathered


def premultiply(reduction: Callable[..., Any]) -> Callable[..., Any]:
    """A reduction with ``ReduceOp.PREMUL_SUM``, which gloo does not know: scale what goes in, then sum."""
    parameters = signature(reduction)
    position = list(parameters.parameters).index("op")

    @wraps(reduction)
    def reduced(*args: Any, **kwargs: Any) -> Any:
        op = kwargs.get("op", args[position] if len(args) > position else None)
        if not isinstance(op, ReduceOp) or op != ReduceOp.PREMUL_SUM:  # type: ignore[comparison-overlap]
            return reduction(*args, **kwargs)
        _, factor = op.__getstate__()  # type: ignore[attr-defined]
        given = parameters.bind(*args, **kwargs).arguments
        given["op"] = ReduceOp.SUM
        with torch.no_grad():
            for name, value in given.items():
                if name == "tensor":
                    value.mul_(factor)
                elif name == "input":
                    given[name] = value * factor
                elif name == "input_list":
                    given[name] = [part * factor for part in value]
        return reduction(**given)

    return reduced


def _even(tensors: Sequence[Any]) -> bool:
    return all(tensor.shape == tensors[0].shape for tensor in tensors)


def _finish(works: Sequence[Any], async_op: bool) -> Works | None:
    together = Works(works)
    if async_op:
        return together
    together.wait()
    return None


def _gloo(backend: Any) -> str:
    """The same request with gloo for nccl: ``"cpu:gloo,cuda:nccl"`` and no request at all are plain gloo."""
    name = str(backend).lower() if backend is not None else "nccl"
    if ":" in name:
        return "gloo" if "nccl" in name else name
    return "gloo" if name in ("nccl", "undefined") else name
