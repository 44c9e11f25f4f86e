"""Bytes that the experts of a MoE layer send: closed forms by which a dispatcher is chosen.

A collective counts on a rank: an all-to-all the larger of what it gives and gets, an all-gather its result, a
reduce-scatter the whole sum.
"""

from __future__ import annotations

from typing import NamedTuple


class ExpertWork(NamedTuple):
    """A micro-batch in a layer, on one of ``ranks`` ranks: tokens, experts of each, sizes, and bytes of a value and a
    probability."""

    tokens: int
    topk: int
    hidden: int
    value: int
    probability: int
    experts: int
    ranks: int

    @property
    def rows(self) -> int:
        """Rows that a rank sends."""
        return self.tokens * self.topk


def counts(call: ExpertWork) -> int:
    """Bytes of the numbers of rows of all ranks, 64 bits each."""
    return 8 * call.experts * call.ranks


def alltoall(call: ExpertWork, received: int | None = None) -> int:
    """Bytes of rows and probabilities, forward and backward, for a rank that receives ``received`` rows; balanced if None.

    Rows and probabilities go out and the gradients of answers too; answers come back and the gradients of the former.
    """
    arriving = call.rows if received is None else received
    return 2 * max(call.rows, arriving) * (2 * call.hidden * call.value + call.probability)


def shared_by_tensor_ranks(call: ExpertWork, tensor_ranks: int) -> int:
    """Bytes for gathering balanced rows and summing outputs over ``tensor_ranks`` that share every expert, forward and
    backward.

    Answers are summed in the type of probabilities.
    """
    if tensor_ranks == 1:
        return 0
    row = call.hidden * (call.value + call.probability) + call.probability
    return 2 * call.rows * tensor_ranks * row


def allgather(call: ExpertWork) -> tuple[int, int]:
    """Bytes of all-gathers and of reduce-scatters, forward and backward.

    Indices of 4 bytes, probabilities and tokens are gathered, and so are gradients of answers. Answers are summed in the type
    of probabilities.
    """
    chosen, row = call.tokens * call.topk, call.tokens * call.hidden
    gathered = chosen * (4 + call.probability) + row * (call.value + call.probability)
    summed = chosen * call.probability + row * (call.value + call.probability)
    return gathered * call.ranks, summed * call.ranks
