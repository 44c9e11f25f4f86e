"""Arguments of Megatron for experts to which MindSpeed gives a value or a meaning of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from mindspeed.megatron_lm.old_flags.argument_words import ArgumentWords, problem_of_flags
from mindspeed.plugins.fixes import DropOption
from mindspeed.plugins.problems import Problem

DISPATCHER, EXPERTS, TENSOR = "--moe-token-dispatcher-type", "--expert-model-parallel-size", "--tensor-model-parallel-size"
_LOW_PRECISION: Final = ("--fp8-format", "--fp4-format")
_FULL_PRECISION: Final = (
    "moe_permutation_async_comm",
    "moe_alltoall_overlap_comm",
    "moe_allgather_overlap_comm",
    "moe_zero_memory",
    "moe_adaptive_recompute_activation",
    "gemm_gradient_accumulation_fusion",
)
"""Flags that save time or memory, and whose features do not serve linear layers in fp8 or fp4."""


def without_unserved(words: Sequence[str], values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Leave out old flags that do not serve the precision of a command, whose run computes the same without them."""
    made = ArgumentWords(list(words))
    low = next((flag for flag in _LOW_PRECISION if made.value(flag)), None)
    if low is None or not (left := [dest for dest in _FULL_PRECISION if values.get(dest)]):
        return dict(values), []
    flags = [f"--{dest.replace('_', '-')}" for dest in left]
    reason = f"nothing here serves {low} that way, and Megatron's own experts compute the same"
    text = f"{', '.join(flags)} {'is' if len(left) == 1 else 'are'} left out: {reason}"
    kept = {dest: value for dest, value in values.items() if dest not in left}
    return kept, [problem_of_flags("MS113", text, flags, DropOption(", ".join(flags)))]


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
