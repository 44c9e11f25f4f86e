"""The feature against the same layout without it, with dropout, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import Prove, differences

pytestmark = pytest.mark.long

NAME = "swap-attention"
SAVED = 24 * 32 * 4 * (1 + 3 + 1) + 3 * 4 * 24 * 24 * 4
"""Bytes of a layer: input and output of linear_qkv, input of linear_proj, and softmax with its dropout for each head."""
POISON = {"device-emulation": {"poison": True}}


def proven(prove: Prove, *names: str, **request: Any) -> tuple[int, int]:
    """The activation bytes kept without and with the feature, whose results are equal to the bit."""
    verdict = prove(NAME, *names, **request)
    assert verdict.problems == []
    assert differences(verdict) == {0.0}
    return verdict.proof.bytes["saved activations"]


def test_three_of_four_layers_are_on_the_host(prove: Prove) -> None:
    without, swapped = proven(prove, nproc=1)
    assert without - swapped == 3 * SAVED


def test_nothing_reads_what_is_on_the_host(prove: Prove) -> None:
    proven(prove, nproc=1, settings=POISON)


@pytest.mark.parametrize(
    "also",
    [
        ["sequence-parallel"],
        ["pipeline-parallel"],
        ["virtual-pipeline"],
        ["flash-attention"],
        ["ring-attention"],
        ["moe-token-permute"],
    ],
    ids="-".join,
)
def test_a_layout_is_bit_equal(prove: Prove, also: list[str]) -> None:
    proven(prove, also=also)


def test_bf16_is_bit_equal_beside_an_overlapped_reduction(prove: Prove) -> None:
    proven(prove, also=["async-ddp"], world={"dtype": "bf16"}, nproc=2)


def test_it_goes_with_norms_that_are_recomputed(prove: Prove) -> None:
    modules = {NAME: {"modules": ["core_attention", "linear_proj"]}}
    proven(prove, also=["norm-recompute", "activation-recompute"], settings=modules, nproc=1)
