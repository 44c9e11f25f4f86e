"""Sequence parallelism against one process, and against tensor parallelism alone."""

from __future__ import annotations

import pytest

from tests.conftest import Prove

pytestmark = pytest.mark.long


@pytest.mark.parametrize("size", [2, 4])
def test_a_share_of_the_sequence_trains_as_the_whole(prove: Prove, size: int) -> None:
    assert prove("tensor-parallel", "sequence-parallel", settings={"tensor-parallel": {"size": size}}).problems == []


def test_it_changes_nothing_beside_tensor_parallel(prove: Prove) -> None:
    assert prove("sequence-parallel", also=["tensor-parallel"]).problems == []


def test_a_share_of_the_sequence_trains_as_the_whole_in_bf16(prove: Prove) -> None:
    assert prove("sequence-parallel", world={"dtype": "bf16"}).problems == []


def test_it_keeps_fewer_activations_than_tensor_parallel(prove: Prove) -> None:
    alone, shared = prove("sequence-parallel", also=["tensor-parallel"]).proof.bytes["saved activations"]
    assert shared < 0.9 * alone
