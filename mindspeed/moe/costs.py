"""Bytes that a MoE layer sends and keeps: closed forms for checks, pages and tests.

A collective counts on a rank: an all-to-all the larger of what it gives and gets, an all-gather its result, a
reduce-scatter the whole sum.
"""

from __future__ import annotations

import math
from fractions import Fraction
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


def capacity_of(tokens: int, experts: int, topk: int, factor: float, minimum: int) -> int:
    """Places of an expert: ``tokens / experts x factor x topk``, rounded up, at least ``minimum`` and at most ``tokens``."""
    exact = Fraction(tokens * topk, experts) * Fraction(str(factor))
    return min(max(math.ceil(exact), minimum), tokens)


def mask_bytes(tokens: int, experts: int, capacity: int, value: int) -> int:
    """Bytes that the masks of dispatch and combination keep for backward, of values of ``value`` bytes."""
    return 2 * tokens * experts * capacity * value


def equal_tables(rows: int, hidden: int, value: int, ranks: int) -> int:
    """Bytes that leave a rank with tables of ``rows`` rows for all experts: forth and back, forward and backward."""
    return 4 * rows * hidden * value * (ranks - 1) // ranks


def shared_by_tensor_ranks(call: ExpertWork, tensor_ranks: int) -> int:
    """Bytes by which ``tensor_ranks`` that share every expert gather balanced rows and sum answers, forward and backward.

    Answers are summed in the type of probabilities.
    """
    if tensor_ranks == 1:
        return 0
    row = call.hidden * (call.value + call.probability) + call.probability
    return 2 * call.rows * tensor_ranks * row


def once_per_rank(call: ExpertWork, sent: int, received: int) -> int:
    """Bytes as `alltoall`, for a rank that sends and receives so many pairs of a token and a rank with experts of it."""
    experts = call.experts // call.ranks
    return 2 * max(sent, received) * (2 * call.hidden * call.value + experts * call.probability)


def allgather(call: ExpertWork) -> tuple[int, int]:
    """Bytes of all-gathers and of reduce-scatters, forward and backward.

    Indices of 4 bytes, probabilities and tokens are gathered, and so are gradients of answers. Answers are summed in the type
    of probabilities.
    """
    chosen, row = call.tokens * call.topk, call.tokens * call.hidden
    gathered = chosen * (4 + call.probability) + row * (call.value + call.probability)
    summed = chosen * call.probability + row * (call.value + call.probability)
    return gathered * call.ranks, summed * call.ranks


def kept(rows: int, hidden: int, width: int, value: int, activation: int = 0) -> int:
    """Bytes that gated experts keep of ``rows`` rows: the rows, the first product and its activation.

    ``activation`` widths are saved inside of the activation: none where it is one operator, 2 as Megatron composes it.
    """
    return rows * (hidden + (3 + activation) * width) * value


def kept_by_level0(rows: int, width: int, value: int) -> int:
    """Bytes that they keep where only the first product is kept."""
    return rows * 2 * width * value


def kept_by_shared(tokens: int, width: int, value: int, activation: int = 0) -> int:
    """Bytes that gated shared experts of ``width`` keep of ``tokens`` tokens beside their input; ``activation`` as above."""
    return tokens * (3 + activation) * width * value
