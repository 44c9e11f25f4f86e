"""Repeat a forward pass: with the random numbers of its first run, and marked, so that FLOP counters and profilers can tell."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn import Parameter

from mindspeed.platforms import runtime


@dataclass(frozen=True, slots=True)
class RandomState:
    """Read and write the state of a random number generator, or of several at once."""

    get: Callable[[], Any]
    set: Callable[[Any], object]


HOST: Final = RandomState(torch.get_rng_state, torch.set_rng_state)


def generators() -> tuple[RandomState, ...]:
    """The generator of the host and, where there is one, that of the device."""
    device = runtime.device_module()
    has_generator = hasattr(device, "get_rng_state")  # torch.cpu has none of its own
    return (HOST, RandomState(device.get_rng_state, device.set_rng_state)) if has_generator else (HOST,)


@contextmanager
def replayed(generators: Sequence[RandomState], states: Sequence[Any]) -> Iterator[None]:
    """Draw the random numbers that follow ``states``, and go on afterwards as if none had been drawn."""
    before = [generator.get() for generator in generators]
    try:
        for generator, state in zip(generators, states, strict=True):
            generator.set(state)
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set(state)


_state = threading.local()


@contextmanager
def recomputation() -> Iterator[None]:
    """Mark what runs inside as recomputed; for code that repeats a forward pass outside autograd's backward pass."""
    _state.depth = getattr(_state, "depth", 0) + 1
    try:
        yield
    finally:
        _state.depth -= 1


@contextmanager
def watched_functions() -> Iterator[None]:
    """Let `is_recomputing` see inside the forward of a ``torch.autograd.Function``, which runs without gradients."""
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        with recomputation() if is_recomputing() else nullcontext():
            return original.__get__(None, cls)(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


def is_recomputing() -> bool:
    """Return whether this thread recomputes: inside `recomputation`, or in a backward pass with gradients enabled.

    The backward pass of a function runs without gradients; activation checkpointing, reentrant or not, enables them to repeat
    a forward pass. Inside a function's own forward that is seen only under `watched_functions`.
    """
    if getattr(_state, "depth", 0):
        return True
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1


def with_copied_parameters(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around ``checkpoint(function, ...)``: a parameter that the function returns is copied.

    The graph of a checkpoint takes over every tensor that is returned. A parameter would then be a part of the graph, whose
    backward pass enters the checkpoint again without end.
    """

    @functools.wraps(original)
    def wrapper(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def run(*inputs: Any, **keywords: Any) -> Any:
            made = function(*inputs, **keywords)
            if not isinstance(made, tuple):
                return made
            return tuple(part.clone() if isinstance(part, Parameter) else part for part in made)

        return original(run, *args, **kwargs)

    return wrapper
