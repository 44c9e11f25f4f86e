"""The distributed optimizer against one process."""

from __future__ import annotations

import pytest

from tests.conftest import Prove

pytestmark = pytest.mark.long


@pytest.mark.parametrize("count", [2, 4])
def test_a_sharded_step_updates_as_a_whole_one(prove: Prove, count: int) -> None:
    assert prove("distributed-optimizer", nproc=count).problems == []


def test_a_sharded_step_updates_as_a_whole_one_in_bf16(prove: Prove) -> None:
    assert prove("distributed-optimizer", world={"dtype": "bf16"}).problems == []


def test_it_shards_within_a_tensor_parallel_rank(prove: Prove) -> None:
    assert prove("distributed-optimizer", "tensor-parallel", "sequence-parallel", nproc=4).problems == []
