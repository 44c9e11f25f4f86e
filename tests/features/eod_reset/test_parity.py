"""Packed documents against stock Megatron in one process with its own dense mask, in every layout and by every algorithm."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import Prove

pytestmark = pytest.mark.long

ALGORITHMS = ["ring-attention", "ulysses-attention", "kv-allgather-cp"]
TWO_OF_EACH = {"micro_batch_size": 2}
"""Samples with other documents in one micro-batch."""


def cp(size: int, **settings: Any) -> dict[str, dict[str, Any]]:
    return {"context-parallel": {"size": size}, **settings}


@pytest.mark.guards(45, processes=True)
@pytest.mark.parametrize("core", [[], ["flash-attention"]], ids=["own attention", "flash-attention"])
def test_documents_train_as_under_a_dense_mask(prove: Prove, core: list[str]) -> None:
    assert prove("eod-reset", *core, world=TWO_OF_EACH).problems == []


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_they_do_when_spread_over_ranks(prove: Prove, algorithm: str, size: int) -> None:
    assert prove("eod-reset", algorithm, settings=cp(size), world=TWO_OF_EACH).problems == []


def test_they_do_on_three_ranks(prove: Prove) -> None:
    assert prove("eod-reset", "ring-attention", settings=cp(3), nproc=3).problems == []


def test_they_do_when_neighbours_trade_heads_in_a_ring(prove: Prove) -> None:
    settings = cp(4, **{"hybrid-attention": {"ulysses_degree": 2}})
    assert prove("eod-reset", "hybrid-attention", settings=settings, world=TWO_OF_EACH).problems == []


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_rotary_positions_need_no_restart(prove: Prove, algorithm: str) -> None:
    world = {"normalization": "RMSNorm", "num_query_groups": 2}
    assert prove("eod-reset", algorithm, "rms-norm", settings=cp(2), world=world).problems == []


@pytest.mark.parametrize("algorithm", ["", "ring-attention"])
def test_positions_of_the_whole_sequence_may_stay(prove: Prove, algorithm: str) -> None:
    settings = cp(2) if algorithm else {}
    features = ["eod-reset", algorithm] if algorithm else ["eod-reset"]
    assert prove(*features, settings={"eod-reset": {"reset_position_ids": False}, **settings}).problems == []


TENSOR, PIPELINE = {"tensor-parallel": {"size": 2}}, {"pipeline-parallel": {"size": 2}}
INTERLEAVED = {**PIPELINE, "virtual-pipeline": {"size": 2}}
FULL = {"recompute": {"granularity": "full", "method": "uniform", "num_layers": 1}}
LAYOUTS = {
    "pipeline": (PIPELINE, ["pipeline-parallel"]),
    "interleaved": (INTERLEAVED, ["virtual-pipeline"]),
    "tensor and sequence": (TENSOR, ["tensor-parallel", "sequence-parallel"]),
    "pipeline and ring": (cp(2, **PIPELINE), ["pipeline-parallel", "ring-attention"]),
    "interleaved and ring": (cp(2, **INTERLEAVED), ["virtual-pipeline", "ring-attention"]),
    "tensor and ring": (cp(2, **TENSOR), ["tensor-parallel", "sequence-parallel", "ring-attention"]),
    "pipeline and Ulysses": (cp(2, **PIPELINE), ["pipeline-parallel", "ulysses-attention"]),
    "recompute": (FULL, ["recompute"]),
    "recompute and ring": (cp(2, **FULL), ["recompute", "ring-attention"]),
    "recompute in a pipeline": ({**FULL, **PIPELINE}, ["recompute", "pipeline-parallel"]),
    "distributed optimizer and ring": (cp(2), ["distributed-optimizer", "async-ddp", "ring-attention"]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_they_do_beside_other_layouts(prove: Prove, layout: str) -> None:
    settings, features = LAYOUTS[layout]
    assert prove("eod-reset", *features, settings=settings).problems == []


@pytest.mark.parametrize("algorithm", ["", *ALGORITHMS])
def test_they_do_in_multi_latent_attention(prove: Prove, algorithm: str) -> None:
    features = ["eod-reset", algorithm] if algorithm else ["eod-reset"]
    settings = cp(2) if algorithm else {}
    assert prove(*features, settings=settings, world={"multi_latent_attention": True}).problems == []


@pytest.mark.parametrize("algorithm", ["flash-attention", *ALGORITHMS])
def test_they_do_with_a_bias_by_position(prove: Prove, algorithm: str) -> None:
    settings = cp(2) if algorithm in ALGORITHMS else {}
    assert prove("eod-reset", "alibi", algorithm, settings=settings).problems == []


def test_they_do_in_bf16(prove: Prove) -> None:
    assert prove("eod-reset", "ring-attention", settings=cp(2), world={"dtype": "bf16"}).problems == []


def test_no_mask_is_kept_for_backward(prove: Prove) -> None:
    without, with_it = prove("eod-reset", world={"seq_length": 96}).proof.bytes["saved activations"]
    assert with_it < 0.55 * without
