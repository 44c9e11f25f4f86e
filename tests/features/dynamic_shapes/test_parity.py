"""Shapes that travel ahead of tensors, under Megatron's schedules and under lists of operations."""

from __future__ import annotations

import pytest

from tests.conftest import Prove

pytestmark = pytest.mark.long


@pytest.mark.parametrize("vpp", [1, 2])
def test_pipelines_with_shapes_train_as_one_process(prove: Prove, vpp: int) -> None:
    also = ["virtual-pipeline"] if vpp > 1 else []
    assert prove("dynamic-shapes", *also, world={"pp": 2, "vpp": vpp}, nproc=2).problems == []


def test_a_list_of_operations_announces_shapes_and_keeps_megatrons_bits(prove: Prove) -> None:
    also = ["virtual-pipeline", "dynamic-shapes"]
    assert prove("nano-pipe", also=also, world={"pp": 2, "vpp": 2}, nproc=2).problems == []
