"""Two random generators on one device.

Operators on CPU tensors draw from torch's default generator when none is named, and most CPU tensors are device
tensors here: so that generator is the *device's*. The host gets a generator of its own, which ``torch.get_rng_state``
and its kin, factories that create host tensors, and functions that fill them in place (``nn.init``) use instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from mindspeed.platforms.cpu_device import current_device, device_count
from mindspeed.platforms.cpu_host import is_host, made_on_host
from mindspeed.platforms.cpu_tensors import is_device, place

_DEVICE = torch.default_generator
_TorchGenerator = torch.Generator

HOST = torch.Generator()
HOST.set_state(_DEVICE.get_state())


class DeviceGenerators(Sequence[torch.Generator]):
    """``torch.cuda.default_generators``: one generator, under every device number of this host."""

    def __len__(self) -> int:
        return device_count()

    def __getitem__(self, index: Any) -> Any:
        return _DEVICE

    def __iter__(self) -> Iterator[torch.Generator]:
        return iter([_DEVICE] * len(self))


DEVICE_GENERATORS = DeviceGenerators()


class _AnyGenerator(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _TorchGenerator)

    def __getattr__(cls, name: str) -> Any:
        return getattr(_TorchGenerator, name)


class Generator(metaclass=_AnyGenerator):
    """Makes torch's generators, on the CPU also when device cuda is requested."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return _TorchGenerator("cpu" if is_device(device) else device)


def place_random(factory: Callable[..., Any]) -> Callable[..., Any]:
    """A factory that draws: host tensors from the host's generator."""
    return _drawing_for(made_on_host, factory, place(factory))


def draw_from_side(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that draws for its first argument, a tensor: from the generator of the side that it is on."""
    return _drawing_for(lambda args, kwargs: is_host(args[0]), function, function)


def _drawing_for(on_host: Callable[..., bool], function: Callable[..., Any], placed: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function draw from the host's generator where ``on_host(args, kwargs)``."""

    @wraps(function)
    def draw(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("generator") is None and on_host(args, kwargs) and not _is_traced():
            kwargs["generator"] = HOST
        return placed(*args, **kwargs)

    return draw


def place_like(factory: Callable[..., Any]) -> Callable[..., Any]:
    """A factory that draws and takes no generator in every release of torch: here it borrows the host's state."""
    placed = place(factory)

    @wraps(factory)
    def draw(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("generator") is not None or not made_on_host(args, kwargs) or _is_traced():
            return placed(*args, **kwargs)
        device = _DEVICE.get_state()
        _DEVICE.set_state(HOST.get_state())
        try:
            return placed(*args, **kwargs)
        finally:
            HOST.set_state(_DEVICE.get_state())
            _DEVICE.set_state(device)

    return draw


def _is_traced() -> bool:
    """Return whether a graph is being recorded, which cannot hold a generator."""
    if torch.compiler.is_compiling():
        return True
    return any(not getattr(mode, "only_watches", False) for mode in _get_current_dispatch_mode_stack())


def get_rng_state(device: Any = "cuda") -> torch.Tensor:
    return _DEVICE.get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    _DEVICE.set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state()] * device_count()


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Takes the state of this process's device."""
    states = list(new_states)
    set_rng_state(states[min(current_device(), len(states) - 1)])


def manual_seed(seed: int) -> None:
    _DEVICE.manual_seed(int(seed))


def seed() -> None:
    _DEVICE.seed()


def initial_seed() -> int:
    return _DEVICE.initial_seed()


manual_seed_all = manual_seed
seed_all = seed


def _infer_device_type(*args: Any) -> str:
    return "cuda"


def get_device_states(*args: Any) -> tuple[list[int], list[torch.Tensor]]:
    """Replaces the function of this name in ``torch.utils.checkpoint``: every argument is on the device."""
    return [current_device()], [get_rng_state()]
