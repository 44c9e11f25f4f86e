"""Packed documents against stock Megatron in one process with its own dense mask, in every layout and by every algorithm."""

from typing import Any

import pytest

from tests.conftest import Prove
from tests.features.parity import COMPRESSED_MASK, FULL, RINGS, TENSOR, Given, cp, given, trains

TWO_OF_EACH = {"micro_batch_size": 2}
"""Samples with other documents in one micro-batch."""
WHOLE_POSITIONS = {"eod-reset": {"reset_position_ids": False}}
SPLIT, STAGES = {"tensor-parallel": {"size": 2}}, {"pipeline-parallel": {"size": 2}}
CHUNKS = {**STAGES, "virtual-pipeline": {"size": 2}}


@pytest.mark.long
@pytest.mark.guards(45, processes=True)
@pytest.mark.parametrize("core", [[], ["flash-attention"]], ids=["own attention", "flash-attention"])
def test_documents_train_as_under_a_dense_mask(prove: Prove, core: list[str]) -> None:
    assert prove("eod-reset", *core, world=TWO_OF_EACH).problems == []


def by(algorithm: str) -> dict[str, Given]:
    """Two ranks and four with this algorithm."""
    return {
        f"{algorithm}, 2 ranks": given(algorithm, settings=cp(2), **TWO_OF_EACH),
        f"{algorithm}, 4 ranks": given(algorithm, settings=cp(4), **TWO_OF_EACH),
        f"{algorithm}, rotary positions": given(
            algorithm, "rms-norm", settings=cp(2), normalization="RMSNorm", num_query_groups=2
        ),
        f"{algorithm}, latent": given(algorithm, settings=cp(2), multi_latent_attention=True),
        f"{algorithm}, bias": given("alibi", algorithm, settings=cp(2)),
    }


def ring(*features: str, **settings: Any) -> Given:
    return given(*features, "ring-attention", settings=cp(2, **settings))


test_documents_train_so_in_every_layout = trains(
    "eod-reset",
    {case: row for algorithm in RINGS for case, row in by(algorithm).items()}
    | {
        "three ranks": given("ring-attention", settings=cp(3), nproc=3),
        "hybrid": given("hybrid-attention", settings=cp(4, **{"hybrid-attention": {"ulysses_degree": 2}}), **TWO_OF_EACH),
        "positions of the whole sequence": given(settings=WHOLE_POSITIONS),
        "positions of the whole sequence, ring": ring(**WHOLE_POSITIONS),
        "pipeline": given("pipeline-parallel", settings=STAGES),
        "pipeline and ring": ring("pipeline-parallel", **STAGES),
        "pipeline and Ulysses": given("pipeline-parallel", "ulysses-attention", settings=cp(2, **STAGES)),
        "interleaved": given("virtual-pipeline", settings=CHUNKS),
        "interleaved and ring": ring("virtual-pipeline", **CHUNKS),
        "tensor and sequence": given(*TENSOR, settings=SPLIT),
        "tensor and ring": ring(*TENSOR, **SPLIT),
        "recompute": given("recompute", settings=FULL),
        "recompute and ring": ring("recompute", **FULL),
        "recompute in a pipeline": given("recompute", "pipeline-parallel", settings={**FULL, **STAGES}),
        "distributed optimizer and ring": ring("distributed-optimizer", "async-ddp"),
        "latent": given(multi_latent_attention=True),
        "bias": given("alibi", "flash-attention"),
        "ring in bf16": given("ring-attention", settings=cp(2), dtype="bf16"),
    },
)


@pytest.mark.long
def test_no_mask_is_kept_for_backward(prove: Prove) -> None:
    without, with_it = prove("eod-reset", world={"seq_length": 96}).proof.bytes["saved activations"]
    assert with_it - COMPRESSED_MASK < 0.55 * without
