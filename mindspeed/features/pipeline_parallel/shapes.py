"""Shapes of what stages send one another, compared with what their neighbours expect."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from mindspeed import plugins as ms

Shape = tuple[int, ...]


class ShapeCheck:
    """The shapes that a communicator has sent before it learns which one its stages expect, and that one."""

    def __init__(self) -> None:
        self._sent: list[Shape] = []
        self._expected: Shape | None = None

    def add(self, sent: Sequence[Shape], expected: Shape | None) -> None:
        """Compare all shapes that were sent with the expected one. Raises MindSpeedError with MS645."""
        self._sent += sent
        self._expected = expected or self._expected
        if self._expected is None:
            return
        for shape in self._sent:
            if shape != self._expected:
                raise ms.MindSpeedError([_problem(shape, self._expected)])
        self._sent.clear()


def _problem(shape: Shape, expected: Shape) -> ms.Problem:
    text = f"pipeline-parallel: a stage sends a tensor of shape {shape}, but its neighbour expects {expected}"
    return ms.Problem(
        "MS645",
        text,
        ("pipeline-parallel",),
        fix=ms.Fix.advise("add dynamic-shapes, or give all micro-batches the same length"),
    )


def with_checked_shapes(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``P2PCommunicator._communicate``: what is sent has the shape that is expected, where shapes are not exchanged."""
    checks: WeakKeyDictionary[Any, ShapeCheck] = WeakKeyDictionary()

    @functools.wraps(original)
    def communicate(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = self.config
        if not (config.variable_seq_lengths or getattr(config, "mtp_standalone", False)):
            tensors = (kwargs.get("tensor_send_next"), kwargs.get("tensor_send_prev"))
            shape = kwargs.get("tensor_shape")
            sent = [tuple(tensor.shape) for tensor in tensors if tensor is not None]
            checks.setdefault(self, ShapeCheck()).add(sent, None if shape is None else tuple(shape))
        return original(self, *args, **kwargs)

    return communicate
