"""Bytes that MoE layers send and keep: the closed forms that measured numbers are compared with."""

from mindspeed.features.expert_parallel.choice import ExpertWork


def equal_tables(rows: int, hidden: int, value: int, ranks: int) -> int:
    """Bytes that leave a rank with tables of ``rows`` rows for all experts: forth and back, forward and backward."""
    return 4 * rows * hidden * value * (ranks - 1) // ranks


def once_per_rank(call: ExpertWork, sent: int, received: int) -> int:
    """Bytes of an all-to-all, forward and backward, for a rank that sends and receives so many pairs of token and rank."""
    experts = call.experts // call.ranks
    return 2 * max(sent, received) * (2 * call.hidden * call.value + experts * call.probability)


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
