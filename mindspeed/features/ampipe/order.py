"""The order in which chunks of a micro-batch go through a layer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mindspeed.moe.chunks import Steps, finished


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
