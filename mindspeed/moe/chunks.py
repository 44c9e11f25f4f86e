"""Chunks of a micro-batch through a layer in turn, so that the transfers of one are under way while another is computed.

A layer on one chunk is a generator that pauses after every transfer that it has posted. Nodes of autograd run in the reverse
order of the forward code, so that the order of the pauses is the schedule of backward too (`mindspeed.moe.transfer`).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

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


def pipelined(chunks: Sequence[Steps], relayed: bool = False) -> list[Tensor]:
    """Run all chunks to their first pause, then to their second, then to their ends, and give their results.

    The dispatch of a chunk is under way while the next one comes to its dispatch, the return of one while the next one's
    experts are computed. With ``relayed`` the dispatch is followed by a gather and the return preceded by a scatter, each with
    a pause of its own: what has arrived of a chunk is sent on after the computation of the next one.
    """
    computing = [*chunks, *chunks]
    for number, chunk in enumerate(computing):
        next(chunk)
        if relayed and number > 0:
            next(computing[number - 1])
    if relayed:
        next(chunks[-1])
    return [finished(chunk) for chunk in chunks]
