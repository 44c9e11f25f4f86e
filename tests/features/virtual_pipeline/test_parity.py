"""The interleaved schedule against one process."""

import pytest

from tests.conftest import Prove
from tests.features.parity import given, trains

test_interleaved_chunks_train_as_one_process = trains(
    "virtual-pipeline", {"replicas": given("data-parallel"), "bf16": given(dtype="bf16")}
)


@pytest.mark.long
def test_the_layout_is_that_of_the_settings(prove: Prove) -> None:
    verdict = prove("virtual-pipeline", settings={"virtual-pipeline": {"overlap_p2p": True}})
    assert verdict.problems == []
    assert (verdict.proof.world["pp"], verdict.proof.world["vpp"]) == (2, 2)
