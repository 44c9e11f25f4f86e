"""Place of the running pass in a model, for the message of what fails in it."""

from __future__ import annotations

from itertools import count
from typing import Any, Final


class _Place:
    """Count the transfers of the layer that the forward pass is in, and hold what the backward pass has done last.

    A backward pass runs nodes of autograd, which know no layer; its transfers remember the name that they had in forward.
    """

    def __init__(self) -> None:
        self._layer, self._numbers, self.done = "", count(1), ""

    def enter(self, layer: str) -> None:
        """Begin with the transfers of a layer."""
        self._layer, self._numbers = layer, count(1)

    def next_transfer(self) -> str:
        """Return the name of a transfer that the layer makes next."""
        return f"transfer {next(self._numbers)} of {self._layer or 'a layer'}"

    def get(self) -> tuple[Any, ...]:
        """Read it."""
        return self._layer, self._numbers, self.done

    def set(self, kept: tuple[Any, ...]) -> None:
        """Write it."""
        self._layer, self._numbers, self.done = kept


PLACE: Final = _Place()
