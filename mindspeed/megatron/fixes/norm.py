"""Megatron's choice of torch norms."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import wraps
from typing import Any


def allow_sequence_parallel(new: Callable[..., Any]) -> Callable[..., Any]:
    """``WrappedTorchNorm.__new__``: each rank norms its share of the sequence, and the parameters' gradients are
    summed over the tensor-parallel group because they are marked ``sequence_parallel``."""

    @wraps(new)
    def made(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        if not config.sequence_parallel:
            return new(cls, config, *args, **kwargs)
        accepted = copy(config)
        accepted.sequence_parallel = False
        norm = new(cls, accepted, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    return made
