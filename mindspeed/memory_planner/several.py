"""Formulas for one job, evaluated for many layouts at once. Their authors need not know it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from mindspeed.job.world import Signal
from mindspeed.problems import MindSpeedError

Column = NDArray[np.int64]
Answer = TypeVar("Answer")
_NOT_FOR_ARRAYS: Final = (TypeError, ValueError, AttributeError, ArithmeticError)
"""Errors of a formula that cannot compute with arrays; those of a hook arrive as the cause of a problem."""


class LayoutsDifferError(Signal):
    """A formula needs one value where layouts have several; ``values`` has that of each layout."""

    def __init__(self, values: NDArray[Any]) -> None:
        super().__init__("the layouts of one formula differ in a value")
        self.values = values


class Several(np.ndarray[Any, Any]):
    """A number of each of several layouts. Arithmetic is that of arrays; whatever else is done with it needs one value."""

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        return _one(array) if array.dtype == np.bool_ else array.view(Several)

    def __bool__(self) -> bool:
        count = int(np.count_nonzero(self))
        return count == len(self) or (count > 0 and bool(self != 0))

    def __index__(self) -> int:
        return int(_one(self))

    def __int__(self) -> int:
        return int(_one(self))

    def __float__(self) -> float:
        return float(_one(self))

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(_one(self))

    def __format__(self, spec: str) -> str:
        return format(_one(self), spec)

    def __rmul__(self, other: Any) -> Any:
        return NotImplemented if isinstance(other, Sequence) else super().__rmul__(other)


def several(values: NDArray[Any]) -> Any:
    """Return what a formula computes with: a plain number where all layouts have the same."""
    return values[0].item() if _are_same(values) else values.view(Several)


def by_case(function: Callable[[Column], Answer], rows: Column, sizes: Sequence[Column]) -> Iterator[tuple[Column, Answer]]:
    """Yield what ``function`` returns for all rows, for as many of them at once as it does not tell apart.

    Where it cannot compute with arrays it is asked apart for each value of the first of ``sizes`` in which the rows differ.
    """
    waiting = [rows]
    while waiting:
        some = waiting.pop()
        try:
            with np.errstate(divide="raise"):
                found = function(some)
        except LayoutsDifferError as differ:
            waiting += _apart(some, differ.values)
        except (*_NOT_FOR_ARRAYS, MindSpeedError) as error:
            if isinstance(error, MindSpeedError) and not isinstance(error.__cause__, _NOT_FOR_ARRAYS):
                raise
            size = next((size[some] for size in sizes if not _are_same(size[some])), None)
            if size is None:
                raise
            waiting += _apart(some, size)
        else:
            yield some, found


def _one(values: NDArray[Any]) -> Any:
    """Return the value that all layouts have. Raises LayoutsDifferError."""
    plain = values.view(np.ndarray)
    if not _are_same(plain):
        raise LayoutsDifferError(plain)
    return plain[0].item()


def _are_same(values: NDArray[Any]) -> bool:
    return int(np.count_nonzero(values == values[0])) == len(values)


def _apart(rows: Column, values: NDArray[Any]) -> list[Column]:
    return [rows[values == value] for value in np.unique(values)]
