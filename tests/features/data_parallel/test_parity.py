"""Data parallelism against one process with the same global batch."""

from __future__ import annotations

import pytest

from tests.conftest import Prove

pytestmark = pytest.mark.long


@pytest.mark.parametrize("count", [2, 4])
def test_replicas_train_as_one_process(prove: Prove, count: int) -> None:
    assert prove("data-parallel", nproc=count).problems == []


def test_replicas_train_as_one_process_in_bf16(prove: Prove) -> None:
    assert prove("data-parallel", world={"dtype": "bf16"}).problems == []
