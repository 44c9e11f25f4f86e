"""Overlapped gradient reduction against one process."""

from __future__ import annotations

import pytest

from tests.conftest import Prove

pytestmark = pytest.mark.long


def test_overlapped_reduction_trains_as_one_process(prove: Prove) -> None:
    assert prove("async-ddp").problems == []


def test_overlapped_reduction_trains_as_one_process_in_bf16(prove: Prove) -> None:
    assert prove("async-ddp", world={"dtype": "bf16"}).problems == []


def test_it_overlaps_under_an_interleaved_pipeline(prove: Prove) -> None:
    assert prove("async-ddp", "virtual-pipeline").problems == []
