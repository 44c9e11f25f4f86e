"""Detect recomputation, so that FLOP counters and profilers can tell a repeated operator from its first run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

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
