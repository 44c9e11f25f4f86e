"""Pipeline parallelism against one process."""

from __future__ import annotations

import pytest

from tests.conftest import Prove

pytestmark = pytest.mark.long


@pytest.mark.parametrize("size", [2, 4])
def test_stages_train_as_one_process(prove: Prove, size: int) -> None:
    assert prove("pipeline-parallel", settings={"pipeline-parallel": {"size": size}}).problems == []


def test_stages_train_as_one_process_in_bf16(prove: Prove) -> None:
    assert prove("pipeline-parallel", world={"dtype": "bf16"}).problems == []


def test_replicas_of_a_pipeline_train_as_one_process(prove: Prove) -> None:
    assert prove("pipeline-parallel", "data-parallel").problems == []
