"""Arguments of Megatron for experts to which MindSpeed gives a different value or meaning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mindspeed.megatron_lm.argument_words import ArgumentWords, problem_of_flags
from mindspeed.problems.fixes import DropOption

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


def without_unserved(made: ArgumentWords, values: Mapping[str, Any]) -> dict[str, Any]:
    """Skip old flags that do not support the precision of a command, whose run computes the same without them."""
    low = next((flag for flag in _LOW_PRECISION if made.value(flag)), None)
    if low is None or not (left := [dest for dest in _FULL_PRECISION if values.get(dest)]):
        return dict(values)
    flags = [f"--{dest.replace('_', '-')}" for dest in left]
    reason = f"mindspeed has no feature for {low}; Megatron's experts compute the same result"
    text = f"{', '.join(flags)} {'is' if len(left) == 1 else 'are'} skipped: {reason}"
    made.left_out.append(problem_of_flags("MS113", text, flags, DropOption(", ".join(flags))))
    return {dest: value for dest, value in values.items() if dest not in left}


def in_new_meaning(made: ArgumentWords, extends: bool) -> None:
    """Rewrite them, with a note for each that changed.

    With ``extends`` the expert-parallel size counts ranks per tensor-parallel rank; here it counts all ranks with experts.
    """
    if made.value(DISPATCHER) == "alltoall_seq":
        made.change(DISPATCHER, "alltoall")
        text = "alltoall_seq is replaced by alltoall, the only all-to-all dispatcher since Megatron 0.14"
        made.notes.append(f"{DISPATCHER} {text}")
    ranks, tensor_ranks = made.number(EXPERTS), made.number(TENSOR)
    if extends and ranks is not None and tensor_ranks is not None:
        total = ranks * tensor_ranks
        made.change(EXPERTS, str(total))
        text = f"{EXPERTS} {ranks} with --moe-tp-extend-ep is {total} ranks with experts, {ranks} x tp {tensor_ranks}"
        made.notes.append(text)
