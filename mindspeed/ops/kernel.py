"""Kernel: the implementation of an operator on one platform, with the calls that it supports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Kernel(NamedTuple):
    """``run`` has the arguments of the operator's schema; ``supports``, with the same arguments, refuses calls beforehand.

    Without ``supports`` the kernel runs every call. A refused call runs the reference.
    """

    run: Callable[..., Any]
    supports: Callable[..., bool] | None = None


def with_reference(kernel: Kernel, reference: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that runs ``kernel`` where it supports the call, else ``reference``."""
    run, supports = kernel
    if supports is None:
        return run

    def call(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs) if supports(*args, **kwargs) else reference(*args, **kwargs)

    return call
