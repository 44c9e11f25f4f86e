"""Sequence parallelism against one process, and against tensor parallelism alone."""

import pytest

from tests.conftest import Prove
from tests.features.parity import given, trains

test_a_share_of_the_sequence_trains_as_the_whole = trains(
    "sequence-parallel",
    {f"{size} ranks": given("tensor-parallel", settings={"tensor-parallel": {"size": size}}) for size in (2, 4)}
    | {"bf16": given(dtype="bf16")},
)


@pytest.mark.long
def test_it_changes_nothing_beside_tensor_parallel_and_keeps_fewer_activations(prove: Prove) -> None:
    verdict = prove("sequence-parallel", also=["tensor-parallel"])
    alone, shared = verdict.proof.bytes["saved activations"]
    assert verdict.problems == []
    assert shared < 0.9 * alone
