"""Placement of tensors on the CPU: device ``cuda`` in any spelling means the CPU.

The functions that take a callable are wrappers named by the patch tables of `mindspeed.platforms.cpu`;
what they return stands for the torch function they were given. A call costs about 0.2 microseconds more, or 0.7 where it
makes a host tensor (`mindspeed.platforms.cpu_host`).
"""

from __future__ import annotations

import sys
from functools import lru_cache, wraps
from typing import Any

import torch
from torch.utils import _device

from mindspeed.platforms import cpu_memory
from mindspeed.platforms.cpu_host import ACCELERATOR, is_host, made_on_host, mark_host, read_listeners, report_read
from mindspeed.plugins.patches import Function, wrapper

_CPU = torch.device("cpu")
_clone = torch._C.TensorBase.clone
_stock_constructors = _device._device_constructors


def is_device(device: Any) -> bool:
    """Return whether ``device`` names the accelerator: ``"cuda"``, ``"cuda:1"``, ``torch.device("cuda")`` or a number."""
    if device is None:
        return False
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


def place(factory: Function) -> Function:
    """A function with keyword ``device``, and maybe ``pin_memory``."""

    @wraps(factory)
    def placed(*args: Any, **kwargs: Any) -> Any:
        on_host = made_on_host(args, kwargs)
        if kwargs:
            if is_device(kwargs.get("device")):
                kwargs["device"] = _CPU
            if "pin_memory" in kwargs:
                kwargs["pin_memory"] = False
        return _allocate(factory, args, kwargs, on_host)

    return placed


def _allocate(factory: Function, args: tuple[Any, ...], kwargs: dict[str, Any], on_host: bool) -> Any:
    """Call a factory; memory that is not there is an OutOfMemoryError, as on a device."""
    used = 0 if cpu_memory.LIMIT is None else cpu_memory.memory_allocated()
    try:
        made = factory(*args, **kwargs)
    except RuntimeError as error:
        raise cpu_memory.as_out_of_memory(error) from None
    if on_host:
        return mark_host(made)
    return made if cpu_memory.LIMIT is None else cpu_memory.hold_to_limit(made, used)


@wrapper
def place_context(init: Function, self: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
    """``DeviceContext.__init__``."""
    return init(self, ACCELERATOR if is_device(device) else device, *args, **kwargs)


@wrapper
def move_module(to: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """``Module.to``."""
    if args and is_device(args[0]):
        args = (_CPU, *args[1:])
    if is_device(kwargs.get("device")):
        kwargs["device"] = _CPU
    return to(self, *args, **kwargs)


def move_tensor(to: Function) -> Function:
    """``Tensor.to``. The string ``"cpu"`` names the host; a ``torch.device`` may come from another tensor and then means
    "where that one is". What changes sides is copied."""

    @wraps(to)
    def moved(self: Any, *args: Any, **kwargs: Any) -> Any:
        device, on_host = args[0] if args else kwargs.get("device"), is_host(self)
        to_host = isinstance(device, str) and device == "cpu"
        if read_listeners and device == _CPU and len(args) == 1 and kwargs == {"non_blocking": True}:
            to_host = True  # as Megatron copies its counts of tokens; a move to where a tensor is would change the type too
        to_device = is_device(device)
        if to_device:
            if args:
                args = (_CPU, *args[1:])
            else:
                kwargs["device"] = _CPU
            if on_host:
                cpu_memory.hold_copy_to_limit(self)
        if (to_device and on_host) or (to_host and not on_host):
            kwargs["copy"] = True
        if to_host:
            report_read("to", self)
        result = to(self, *args, **kwargs)
        return mark_host(result) if to_host or (on_host and not to_device) else result

    return moved


@wrapper
def move_to_device(cuda: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """``Tensor.cuda``: a copy of a host tensor, a device tensor itself."""
    if not is_host(self):
        return self
    cpu_memory.hold_copy_to_limit(self)
    return _clone(self)


@wrapper
def stay(cuda: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """``Storage.cuda``."""
    return self


@wrapper
def copy_to_host(cpu: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """``Tensor.cpu``: code that keeps a host copy must not see later writes to the device tensor."""
    report_read("cpu", self)
    return self if is_host(self) else mark_host(_clone(self, **kwargs))


@wrapper
def pin(pin_memory: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """``Tensor.pin_memory``."""
    return mark_host(_clone(self))


@wrapper
def record(record_stream: Function, self: Any, stream: Any) -> None:
    """``Tensor.record_stream``: work runs in program order."""


def type_name(type: Function) -> Function:
    """``Tensor.type``: returns the CUDA name to Megatron, and the real name to all other code."""

    @wraps(type)
    def named(self: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None and sys._getframe(1).f_globals.get("__name__", "").startswith("megatron."):
            return type(self).replace("torch.", "torch.cuda.", 1)
        return type(self, dtype, *args, **kwargs)

    return named


@wrapper
def restore(default_restore_location: Function, storage: Any, location: Any) -> Any:
    """``torch.serialization.default_restore_location``."""
    return default_restore_location(storage, "cpu" if is_device(location) else location)


@lru_cache(maxsize=1)
def _device_constructors() -> set[Any]:
    """The factories that a device context knows, unwrapped: the context sees the call that a wrapper makes."""
    return {getattr(factory, "__wrapped__", factory) for factory in _stock_constructors.__wrapped__()}


@wrapper
def find_builtin(find: Function, function: Any) -> Any:
    """``torch.jit._builtins._find_builtin``: the wrapper of a factory is scripted as the factory."""
    return find(function) or find(getattr(function, "__wrapped__", function))
