"""Training with the chunked loss beside Megatron's loss: layouts, tied and untied weights, multi-token prediction, masks."""

from typing import Any

import pytest

from tests.conftest import Prove
from tests.features.parity import BUCKETS, cp, given, trains

NAME = "chunked-loss"
RECOMPUTE = {NAME: {"chunks": 4}}
ACCUMULATE = {NAME: {"chunks": 4, "mode": "accumulate"}}
ODD: dict[str, Any] = {NAME: {"chunk_size": 7}}

test_the_loss_in_chunks_keeps_the_claim = trains(
    NAME,
    {
        "one process, accumulate": given(settings=ACCUMULATE, nproc=1),
        "one process, odd chunks, bf16": given(settings=ODD, nproc=1, dtype="bf16"),
        "one process, untied": given(nproc=1, tied_embeddings=False),
        "one process, chunks by default, micro-batches of two": given(settings={NAME: {}}, nproc=1, micro_batch_size=2),
        "two depths": given(settings=RECOMPUTE, nproc=1, mtp_num_layers=2),
        "tensor parallel, tied": given("tensor-parallel", settings=RECOMPUTE, tp=2),
        "tensor parallel, accumulate, untied": given("tensor-parallel", settings=ACCUMULATE, tp=2, tied_embeddings=False),
        "sequence parallel, bf16": given("sequence-parallel", settings=ODD, tp=2, dtype="bf16"),
        "sequence parallel, accumulate": given("sequence-parallel", settings=ACCUMULATE, tp=2),
        "sequence parallel, one depth": given("sequence-parallel", settings=RECOMPUTE, tp=2, mtp_num_layers=1),
        "context parallel": given("ring-attention", settings=cp(2, **RECOMPUTE), cp=2),
        "last stage, tied": given("pipeline-parallel", settings=RECOMPUTE, pp=2),
        "last stage, one depth": given(
            "pipeline-parallel",
            settings=RECOMPUTE,
            pp=2,
            mtp_num_layers=1,
            tied_embeddings=False,  # Megatron saves no tied weights of a depth behind the first stage,
            rotary=True,  # and does not sum the gradients of its position embeddings
        ),
        "last stage of tensor-parallel ranks, untied": given(
            "sequence-parallel", "pipeline-parallel", settings=ACCUMULATE, tp=2, pp=2, tied_embeddings=False
        ),
        "tensor and context parallel": given("sequence-parallel", "ring-attention", settings=cp(2, **RECOMPUTE), tp=2, cp=2),
        "gradients added to buffers": given("matmul-add", settings=RECOMPUTE, nproc=1),
        "gradients added to buffers of replicas": given("matmul-add", also=BUCKETS, settings=RECOMPUTE, nproc=2),
        "split backward passes": given("zero-bubble", settings=RECOMPUTE, pp=2),
    },
)


@pytest.mark.long
@pytest.mark.parametrize("chunks", [1, 3, 24])
def test_the_bytes_of_logits_that_are_kept_are_gone(prove: Prove, chunks: int) -> None:
    verdict = prove(NAME, settings={NAME: {"chunks": chunks}}, nproc=1, steps=1)
    assert verdict.problems == []
    without, chunked = verdict.proof.bytes["saved activations"]
    assert without - chunked == 24 * (64 * 4 + 1)
