"""Collectives of tensors that are views: NCCL copies some, and refuses the others, which gloo would send as wrong data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import GroupMember

from mindspeed.platforms.collectives import CollectiveCall, read_call
from mindspeed.plugins.patches import Function, wrapper


@wrapper
def refuse_views(collective: Function, *args: Any, **kwargs: Any) -> Any:
    """A collective that raises for a tensor that is not contiguous where NCCL raises, or would send wrong data."""
    if _has_view((*args, *kwargs.values())):
        call = read_call(collective, args, kwargs)
        if call.arguments.get("group") is not GroupMember.NON_GROUP_MEMBER:
            for tensor in _sent_as_stored(call):
                _check(call.kind, tensor)
    return collective(*args, **kwargs)


@wrapper
def copy_views(scatter: Function, tensor: Any, scatter_list: Any = None, *args: Any, **kwargs: Any) -> Any:
    """``scatter`` of views: their elements are sent, as after a copy to a device, which leaves no view."""
    parts = scatter_list and [part.contiguous() for part in scatter_list]
    return scatter(tensor, parts, *args, **kwargs)


def _sent_as_stored(call: CollectiveCall) -> tuple[Tensor, ...]:
    """Return the tensors that NCCL reads and writes without regard to strides; lists of equal shapes are copied."""
    if call.kind == "scatter" or (call.kind == "reduce_scatter" and _equal_shapes(call.inputs)):
        return call.outputs
    if call.kind == "all_gather" and _equal_shapes(call.outputs):
        return call.inputs
    return (*call.inputs, *call.outputs)


def _check(kind: str, tensor: Tensor) -> None:
    if not _is_dense(tensor):
        what = f"{kind} got shape {tuple(tensor.shape)} with strides {tensor.stride()}"
        raise ValueError(f"Tensors must be contiguous: {what}. fix: pass tensor.contiguous(), and copy a result back")


def _has_view(values: Iterable[Any]) -> bool:
    return any(
        not _is_dense(value) if isinstance(value, Tensor) else isinstance(value, (list, tuple)) and _has_view(value)
        for value in values
    )


def _equal_shapes(tensors: tuple[Tensor, ...]) -> bool:
    return all(tensor.shape == tensors[0].shape for tensor in tensors)


def _is_dense(tensor: Tensor) -> bool:
    """Return whether NCCL calls a tensor contiguous: in rows, or with its channels last."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return True
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    return channels_last is not None and tensor.is_contiguous(memory_format=channels_last)
