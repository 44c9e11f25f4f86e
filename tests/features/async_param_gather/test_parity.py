"""Overlapped weight gathering against one process."""

from __future__ import annotations

import pytest

from tests.conftest import Prove

pytestmark = pytest.mark.long


def test_both_overlaps_and_the_distributed_optimizer_train_as_one_process(prove: Prove) -> None:
    assert prove("async-param-gather", "async-ddp", "distributed-optimizer").problems == []


def test_overlapped_gathering_trains_as_one_process_in_bf16(prove: Prove) -> None:
    assert prove("async-param-gather", world={"dtype": "bf16"}).problems == []


def test_it_overlaps_under_an_interleaved_pipeline(prove: Prove) -> None:
    assert prove("async-param-gather", "virtual-pipeline").problems == []
