"""Chunks of a micro-batch through a layer in turn, so that the transfers of one are under way while another is computed.

A layer on one chunk is a generator that pauses after every transfer that it has posted. Nodes of autograd run in the reverse
order of the forward code, so that the order of the pauses is the schedule of backward too (`mindspeed.moe.transfer`).
"""

from __future__ import annotations

from collections.abc import Generator

from torch import Tensor

Steps = Generator[None, None, Tensor]
"""A computation that pauses after each post of a transfer, and returns its result at the end."""


def finished(steps: Steps) -> Tensor:
    """Run what is left of a computation, and give its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Tensor = end.value
            return result
