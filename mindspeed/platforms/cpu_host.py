"""Host tensors on the CPU: those whose storage is marked. Every other CPU tensor is a device tensor.

Factories mark what they make without a device or on ``"cpu"``; views, parameters and detached tensors share the storage.
The result of an operator is a device tensor, except a copy, a conversion or a factory's result after a host tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, Final

import torch
from torch.utils._device import DeviceContext

ACCELERATOR: Final = torch.device("cpu", 0)
"""The device of ``with torch.device("cuda")`` and ``torch.set_default_device("cuda")``; the host's has no index."""

_Base: Final[Any] = torch._C.TensorBase

read_listeners: Final[list[Callable[[str, torch.Tensor], None]]] = []
"""Functions that are told of every copy of a device tensor to the host: its operation and the tensor."""


def _storage(tensor: Any) -> Any:
    """Storage of a tensor; None in a graph that is recorded, and for sparse and functional tensors, which have none."""
    if torch.compiler.is_compiling():
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def mark_host(tensor: Any) -> Any:
    """Make a tensor, and all that share its storage, host tensors; give it back."""
    if (storage := _storage(tensor)) is not None:
        storage.is_host = True
    return tensor


def is_host(tensor: Any) -> bool:
    """Return whether a tensor represents host memory; in a recorded graph none does."""
    return hasattr(_storage(tensor), "is_host")


def report_read(operation: str, tensor: torch.Tensor) -> None:
    """Tell the listeners that a tensor is read, unless it is on the host."""
    if read_listeners and not is_host(tensor):
        for listener in read_listeners:
            listener(operation, tensor)


def made_on_host(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a factory called like this makes a host tensor.

    A ``torch.device`` may come from another tensor and then means the place of that one, which is the device.
    """
    if torch.compiler.is_compiling():
        return False
    device = kwargs.get("device")
    if device is not None:
        return isinstance(device, str) and device.startswith("cpu")
    source = kwargs.get("out", args[0] if args else kwargs.get("input", kwargs.get("data")))
    if isinstance(source, _Base):
        return is_host(source)
    return not _in_device_context()


def _in_device_context() -> bool:
    """Return whether factories make device tensors when no device is given."""
    for depth in reversed(range(torch._C._len_torch_function_stack())):
        mode = torch._C._get_function_stack_at(depth)
        if isinstance(mode, DeviceContext):
            return bool(mode.device == ACCELERATOR)
    return False


def keep_side(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of tensors that copies or converts: after a host tensor the result is one."""

    @wraps(method)
    def kept(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        return mark_host(result) if is_host(self) else result

    return kept


def _is_cuda(tensor: Any) -> bool:
    """``Tensor.is_cuda``: True of device tensors, except for torch itself, which would look for a CUDA kernel."""
    if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] == "torch":
        return bool(_Base.is_cuda.__get__(tensor))
    return tensor.device.type == "cpu" and not is_host(tensor)


is_cuda: Final = property(_is_cuda)
