"""Rows by index against products with masks, and against the formula of the layer."""

from __future__ import annotations

import pytest

from tests.conftest import Prove

pytestmark = pytest.mark.long


@pytest.mark.parametrize("also", [(), ("deepspeed-moe",)], ids=["formula", "masks"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_rows_by_index_are_rows_by_masks(prove: Prove, dtype: str, also: tuple[str, ...]) -> None:
    features = ("deepspeed-moe-rearrange", "expert-parallel")
    assert prove(*features, also=also, world={"ep": 2, "dtype": dtype}, nproc=2).problems == []


def test_rows_by_index_of_tensor_ranks(prove: Prove) -> None:
    names = ("deepspeed-moe-rearrange", "expert-parallel", "tensor-parallel", "sequence-parallel")
    assert (
        prove(
            *names,
            settings={"deepspeed-moe": {"groups": 4}, "expert-parallel": {"expert_tensor_size": 2}},
            world={"ep": 2, "tp": 2},
            nproc=4,
        ).problems
        == []
    )
