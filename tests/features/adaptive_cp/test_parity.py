"""Adaptive context parallelism against Megatron in one process with the same mask."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import Prove

pytestmark = pytest.mark.long

SHARED = ("shared-attention-mask",)
"""Both runs have it: that it is stock Megatron with that mask, to the bit, is its own test."""
MASKS: dict[str, dict[str, Any]] = {
    "window": {"kind": "sliding-window", "width": 3},
    "prefix": {"kind": "prefix", "prefix": 7},
    "interleaved": {"kind": "tests.features.adaptive_cp.masks:interleaved"},
}


def given(size: int, mask: str, **adaptive: Any) -> dict[str, dict[str, Any]]:
    return {"context-parallel": {"size": size}, "shared-attention-mask": MASKS[mask], "adaptive-cp": adaptive}


def test_with_a_causal_mask_it_is_stock_megatron(prove: Prove) -> None:
    assert prove("adaptive-cp", settings={"context-parallel": {"size": 2}}).problems == []


@pytest.mark.parametrize("mask", ["window", "prefix", "interleaved"])
def test_with_a_shared_mask_it_is_one_process_with_that_mask(prove: Prove, mask: str) -> None:
    assert prove("adaptive-cp", settings=given(2, mask), also=SHARED).problems == []


def test_rotary_positions_follow_the_tokens_to_their_ranks(prove: Prove) -> None:
    world = {"normalization": "RMSNorm", "num_query_groups": 2}
    assert prove("adaptive-cp", "rms-norm", settings=given(2, "interleaved"), world=world, also=SHARED).problems == []


def test_a_mask_that_comes_with_each_batch_is_planned_by_itself(prove: Prove) -> None:
    settings = {"context-parallel": {"size": 2}, "adaptive-cp": {"dynamic_mask": True}}
    assert prove("adaptive-cp", settings=settings).problems == []


@pytest.mark.parametrize("adaptive", [{}, {"only_reschedule": True}, {"without_coarse": True}, {"coarse": 4}], ids=str)
def test_settings_change_nothing(prove: Prove, adaptive: dict[str, Any]) -> None:
    assert prove("adaptive-cp", settings=given(2, "interleaved", **adaptive), also=SHARED).problems == []


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("degree", [1, 2])
def test_it_does_on_four_ranks_alone_and_inside_neighbours_that_trade_heads(prove: Prove, mask: str, degree: int) -> None:
    assert prove("adaptive-cp", settings=given(4, mask, ulysses_degree=degree), also=SHARED).problems == []


def test_a_share_need_not_be_even(prove: Prove) -> None:
    settings = given(3, "interleaved")
    assert prove("adaptive-cp", settings=settings, world={"seq_length": 27}, also=SHARED, nproc=3).problems == []


BESIDE: dict[str, tuple[dict[str, Any], list[str]]] = {
    "tensor-parallel": ({"tensor-parallel": {"size": 2}}, ["tensor-parallel", "sequence-parallel"]),
    "pipeline-parallel": ({"pipeline-parallel": {"size": 2}}, ["pipeline-parallel"]),
    "distributed-optimizer": ({}, ["distributed-optimizer", "async-ddp", "async-param-gather"]),
    "recompute": ({"recompute": {"granularity": "full", "method": "uniform", "num_layers": 1}}, ["recompute"]),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("other", BESIDE)
def test_it_does_beside_other_layouts(prove: Prove, other: str, dynamic: bool) -> None:
    settings, features = BESIDE[other]
    if dynamic:
        settings = {"context-parallel": {"size": 2}, "adaptive-cp": {"dynamic_mask": True}, **settings}
        assert prove("adaptive-cp", *features, settings=settings).problems == []
    else:
        assert prove("adaptive-cp", *features, settings=given(2, "interleaved") | settings, also=SHARED).problems == []


def test_it_does_in_bf16(prove: Prove) -> None:
    assert prove("adaptive-cp", settings=given(2, "interleaved"), world={"dtype": "bf16"}, also=SHARED).problems == []
