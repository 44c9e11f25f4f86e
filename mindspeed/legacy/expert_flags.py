"""Arguments of Megatron for experts to which MindSpeed gives a value or a meaning of its own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

DISPATCHER, EXPERTS, TENSOR = "--moe-token-dispatcher-type", "--expert-model-parallel-size", "--tensor-model-parallel-size"


def in_new_meaning(argv: Sequence[str], extends: bool) -> tuple[list[str], list[str]]:
    """Rewrite them, with a note for each that changed.

    With ``extends`` the expert-parallel size counts ranks per tensor-parallel rank; here it counts all ranks with experts.
    """
    tokens, notes = list(argv), []
    if _value(tokens, DISPATCHER) == "alltoall_seq":
        tokens = _with_value(tokens, DISPATCHER, "alltoall")
        notes.append(f"{DISPATCHER} alltoall_seq means alltoall, the only all-to-all dispatcher since Megatron 0.14")
    ranks, tensor_ranks = _value(tokens, EXPERTS), _value(tokens, TENSOR)
    if extends and ranks.isdigit() and tensor_ranks.isdigit():
        total = int(ranks) * int(tensor_ranks)
        tokens = _with_value(tokens, EXPERTS, str(total))
        notes.append(f"{EXPERTS} {ranks} with --moe-tp-extend-ep means {total} ranks with experts, {ranks} x tp {tensor_ranks}")
    return tokens, notes


def _value(tokens: Sequence[str], flag: str) -> str:
    """The last value of a flag, as ``--flag value`` or ``--flag=value``; empty without it."""
    values = [after for token, after in pairwise(tokens) if token == flag]
    values += [token.partition("=")[2] for token in tokens if token.startswith(f"{flag}=")]
    return values[-1] if values else ""


def _with_value(tokens: Sequence[str], flag: str, value: str) -> list[str]:
    """Tokens with another value of a flag that has one."""
    new = [f"{flag}={value}" if token.startswith(f"{flag}=") else token for token in tokens]
    return [value if before == flag else token for before, token in zip(["", *new], new, strict=False)]
