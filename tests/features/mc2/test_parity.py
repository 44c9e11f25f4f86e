"""Fused linear layers against one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import Prove

pytestmark = pytest.mark.long


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_it_trains_as_one_process(prove: Prove, dtype: str) -> None:
    world = {"normalization": "RMSNorm", "gated_linear_unit": True, "activation": "silu", "num_query_groups": 2}
    assert prove("mc2", world={"dtype": dtype, **world}).problems == []


@pytest.mark.parametrize(
    ("also", "world"),
    [(["pipeline-parallel"], {"pp": 2}), (["matmul-add"], {}), (["distributed-optimizer", "async-ddp"], {"world_size": 4})],
    ids=str,
)
def test_it_composes(prove: Prove, also: list[str], world: dict[str, Any]) -> None:
    assert prove("mc2", *also, world={"tp": 2, **world}).problems == []
