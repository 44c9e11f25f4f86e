"""Moments that are fp32 while a window of the optimizer needs them, and bf16 between steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from mindspeed.memory.windows import MainWeight, OptimizerWindow


@contextmanager
def in_fp32(window: OptimizerWindow) -> Iterator[None]:
    """Give a window fp32 moments, and round those that it leaves to bf16.

    A checkpoint that is saved gets fp32 copies, so the moments between steps stay as they are.
    """
    resting = [(member, member.moments) for member in window.weights]
    for member, moments in resting:
        _place(member, {name: moment.float() for name, moment in moments.items()})
    try:
        yield
    finally:
        for member, moments in resting:
            left = moments if window.use == "save" else {name: moment.bfloat16() for name, moment in member.moments.items()}
            _place(member, left)


def _place(member: MainWeight, moments: dict[str, Tensor]) -> None:
    if moments:
        member.optimizer.state[member.main].update(moments)
