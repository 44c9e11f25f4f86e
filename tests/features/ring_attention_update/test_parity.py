"""A ring that merges by the operator against the same ring in stock Megatron's place, and against one process."""

from __future__ import annotations

import pytest

from tests.conftest import Prove

pytestmark = pytest.mark.long

RING = {"context-parallel": {"size": 2}}


def test_a_ring_that_merges_by_the_operator_trains_as_one_process(prove: Prove) -> None:
    assert prove("ring-attention", "ring-attention-update", settings=RING).problems == []


def test_it_changes_nothing_beside_a_ring(prove: Prove) -> None:
    assert prove("ring-attention-update", settings=RING, also=["ring-attention"]).problems == []
