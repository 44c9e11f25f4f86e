"""Expert parallelism against one process, with each dispatcher."""

from __future__ import annotations

import pytest

from tests.conftest import Prove

pytestmark = pytest.mark.long


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_spread_experts_train_as_one_process(prove: Prove, dispatcher: str) -> None:
    assert prove("expert-parallel", settings={"expert-parallel": {"dispatcher": dispatcher}}).problems == []


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_spread_experts_train_as_one_process_beside_tensor_parallel(prove: Prove, dispatcher: str) -> None:
    settings = {"expert-parallel": {"dispatcher": dispatcher}}
    assert prove("expert-parallel", "tensor-parallel", "sequence-parallel", settings=settings, nproc=4).problems == []


def test_spread_experts_train_as_one_process_in_bf16(prove: Prove) -> None:
    assert prove("expert-parallel", world={"dtype": "bf16"}).problems == []


def test_spread_experts_shard_their_optimizer(prove: Prove) -> None:
    assert prove("expert-parallel", "distributed-optimizer", nproc=4).problems == []
