"""Convert operands under ``torch.autocast`` as PyTorch does for its operators: for products to its type, else to the widest.

Without autocast the operators take tensors as they are, and refuse types that do not match.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce, wraps
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])
Common = Callable[[str, Sequence[Tensor]], torch.dtype]


def in_autocast_type(*names: str) -> Callable[[Function], Function]:
    """Decorate an operator of matrix products: under autocast the arguments ``names`` are converted to autocast's type."""
    return _converting(names, lambda device, tensors: torch.get_autocast_dtype(device))


def in_widest_type(*names: str) -> Callable[[Function], Function]:
    """Decorate an operator that sums: under autocast the arguments ``names`` are converted to their common type."""
    return _converting(names, lambda device, tensors: reduce(torch.promote_types, (tensor.dtype for tensor in tensors)))


def in_type_of(output: str, *names: str) -> Callable[[Function], Function]:
    """Decorate an operator that writes ``output``: under autocast the arguments ``names`` are converted to its type."""
    return _converting((output, *names), lambda device, tensors: tensors[0].dtype)


def _converting(names: Sequence[str], common: Common) -> Callable[[Function], Function]:
    def decorate(function: Function) -> Function:
        bound = signature(function)

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch._C._is_any_autocast_enabled():
                return function(*args, **kwargs)
            given = bound.bind(*args, **kwargs)
            tensors = [tensor for name in names for tensor in _floating(given.arguments.get(name))]
            device = tensors[0].device.type if tensors else "cpu"
            if not tensors or not torch.is_autocast_enabled(device):
                return function(*args, **kwargs)
            dtype = common(device, tensors)
            for name in names:
                if name in given.arguments:
                    given.arguments[name] = _converted(given.arguments[name], dtype)
            with torch.autocast(device, enabled=False):
                return function(*given.args, **given.kwargs)

        return call  # type: ignore[return-value]

    return decorate


def _floating(value: Any) -> Iterable[Tensor]:
    values = value if isinstance(value, list | tuple) else [value]
    return [one for one in values if isinstance(one, Tensor) and one.is_floating_point() and one.dtype != torch.float64]


def _converted(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_converted(one, dtype) for one in value)
    return value.to(dtype) if _floating(value) else value
