"""The interleaved schedule against one process."""

from __future__ import annotations

import pytest

from tests.conftest import Prove

pytestmark = pytest.mark.long


def test_interleaved_chunks_train_as_one_process(prove: Prove) -> None:
    verdict = prove("virtual-pipeline", settings={"virtual-pipeline": {"overlap_p2p": True}})
    assert verdict.problems == []
    assert (verdict.proof.world["pp"], verdict.proof.world["vpp"]) == (2, 2)


def test_replicas_of_interleaved_chunks_train_as_one_process(prove: Prove) -> None:
    assert prove("virtual-pipeline", "data-parallel").problems == []


def test_interleaved_chunks_train_as_one_process_in_bf16(prove: Prove) -> None:
    assert prove("virtual-pipeline", world={"dtype": "bf16"}).problems == []
