"""Functional collectives by the functions of torch.distributed, which hold them to the rules of a backend.

torch's own kernels call the backend in C++. Those here start the collective and keep its handle until ``wait_tensor``.
Coalesced collectives are started one after another. Messages, which only compiled programs send so, keep torch's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import GroupName

_NAMESPACE: Final = "_c10d_functional"
_handles: Final[dict[int, list[Any]]] = {}
"""Handles of collectives that nobody has waited for, by the storage of their output."""


def install() -> Callable[[], None]:
    """Replace the kernels until the function that is returned is called."""
    library: Any = torch.library.Library(_NAMESPACE, "IMPL")  # type: ignore[no-untyped-call]
    for name, kernel in _KERNELS.items():
        library.impl(name, kernel, "CPU")
    remove: Callable[[], None] = library._destroy
    return remove


def _group(name: Any) -> Any:
    return _resolve_process_group(GroupName(name)) if isinstance(name, str) else name


def _started(output: Tensor, handle: Any) -> Tensor:
    if handle is not None:
        _handles.setdefault(output.untyped_storage()._cdata, []).append(handle)
    return output


def _wait_tensor(tensor: Tensor) -> Tensor:
    for handle in _handles.pop(tensor.untyped_storage()._cdata, ()):
        handle.wait()
    return tensor


def _reduction(name: str) -> Any:
    return getattr(distributed_c10d.ReduceOp, name.upper())


def _all_reduce_(tensor: Tensor, operation: str, group: Any) -> Tensor:
    return _started(tensor, distributed_c10d.all_reduce(tensor, _reduction(operation), _group(group), async_op=True))


def _all_reduce(tensor: Tensor, operation: str, group: Any) -> Tensor:
    return _all_reduce_(tensor.clone(memory_format=torch.contiguous_format), operation, group)


def _broadcast_(tensor: Tensor, source: int, group: Any) -> Tensor:
    handle = distributed_c10d.broadcast(tensor, group=_group(group), group_src=source, async_op=True)
    return _started(tensor, handle)


def _broadcast(tensor: Tensor, source: int, group: Any) -> Tensor:
    return _broadcast_(tensor.clone(memory_format=torch.contiguous_format), source, group)


def _all_gather_out(tensor: Tensor, ranks: int, group: Any, *, out: Tensor) -> Tensor:
    handle = distributed_c10d.all_gather_into_tensor(out, tensor.contiguous(), _group(group), async_op=True)
    return _started(out, handle)


def _all_gather(tensor: Tensor, ranks: int, group: Any) -> Tensor:
    rows = tensor.shape[0] if tensor.dim() else 1
    return _all_gather_out(tensor, ranks, group, out=tensor.new_empty((ranks * rows, *tensor.shape[1:])))


def _reduce_scatter_out(tensor: Tensor, operation: str, ranks: int, group: Any, *, out: Tensor) -> Tensor:
    handle = distributed_c10d.reduce_scatter_tensor(
        out, tensor.contiguous(), _reduction(operation), _group(group), async_op=True
    )
    return _started(out, handle)


def _reduce_scatter(tensor: Tensor, operation: str, ranks: int, group: Any) -> Tensor:
    out = tensor.new_empty((tensor.shape[0] // ranks, *tensor.shape[1:]))
    return _reduce_scatter_out(tensor, operation, ranks, group, out=out)


def _all_to_all(tensor: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], group: Any) -> Tensor:
    out = tensor.new_empty((sum(output_sizes), *tensor.shape[1:]))
    handle = distributed_c10d.all_to_all_single(
        out, tensor.contiguous(), list(output_sizes), list(input_sizes), _group(group), async_op=True
    )
    return _started(out, handle)


def _each(kernel: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    """Make the kernel of a coalesced collective."""
    return lambda tensors, *args: [kernel(tensor, *args) for tensor in tensors]


_KERNELS: Final[dict[str, Callable[..., Any]]] = {
    "wait_tensor": _wait_tensor,
    "all_reduce": _all_reduce,
    "all_reduce_": _all_reduce_,
    "all_reduce_coalesced": _each(_all_reduce),
    "all_reduce_coalesced_": _each(_all_reduce_),
    "broadcast": _broadcast,
    "broadcast_": _broadcast_,
    "all_gather_into_tensor": _all_gather,
    "all_gather_into_tensor_out": _all_gather_out,
    "all_gather_into_tensor_coalesced": _each(_all_gather),
    "reduce_scatter_tensor": _reduce_scatter,
    "reduce_scatter_tensor_out": _reduce_scatter_out,
    "reduce_scatter_tensor_coalesced": _each(_reduce_scatter),
    "all_to_all_single": _all_to_all,
}
