"""Functions that Megatron gives to torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that was compiled, or the function itself where Megatron did not compile it."""
    original: Callable[..., Any] = getattr(function, "_torchdynamo_orig_callable", function)
    return original
