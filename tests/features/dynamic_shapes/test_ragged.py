"""Micro-batches of different lengths against one process, which needs no shapes."""

from __future__ import annotations

import pytest

from tests.conftest import Prove

pytestmark = pytest.mark.long


@pytest.mark.parametrize("world", [{"vpp": 2}, {"dtype": "bf16"}, {"tp": 2}], ids=["chunks", "bf16", "tp"])
def test_ragged_micro_batches_train_as_one_process(prove: Prove, world: dict[str, object]) -> None:
    assert prove("dynamic-shapes", world={"pp": 2, **world}).problems == []


def test_ragged_micro_batches_of_a_split_sequence_train_as_one_process(prove: Prove) -> None:
    assert prove("dynamic-shapes", "sequence-parallel", world={"pp": 2, "tp": 2}).problems == []


def test_ragged_micro_batches_of_experts_train_as_one_process(prove: Prove) -> None:
    assert prove("dynamic-shapes", also=["moe-token-permute"], world={"pp": 2}, nproc=2).problems == []


def test_ragged_micro_batches_train_on_four_stages(prove: Prove) -> None:
    assert prove("dynamic-shapes", world={"pp": 4, "num_layers": 8}, nproc=4).problems == []


def test_ragged_micro_batches_of_a_list_on_four_stages_are_megatrons(prove: Prove) -> None:
    also = ["pipeline-parallel", "dynamic-shapes"]
    assert prove("nano-pipe", also=also, world={"pp": 4, "num_layers": 8}, nproc=4).problems == []
