"""Experts with biases are computed in units, each expert by a separate module."""

from typing import Any

from tests.features.parity import TENSOR, Given, given, trains


def biased(ep: int, nproc: int, *features: str, parts: int = 2, **world: Any) -> Given:
    settings = {"pipe-experts": {"parts": parts}, "deepspeed-moe": {"groups": nproc}}
    return given(
        "deepspeed-moe", "expert-parallel", *features, settings=settings, nproc=nproc, ep=ep, linear_bias=True, **world
    )


test_training_is_that_of_whole_experts = trains(
    "pipe-experts",
    {
        "two ranks": biased(2, 2),
        "two ranks, bf16": biased(2, 2, dtype="bf16"),
        "four tensor ranks": biased(2, 4, *TENSOR, tp=2),
        "rearranged": biased(2, 2, "deepspeed-moe-rearrange", parts=1),
    },
)
