"""The rotary operator against Megatron's rotary embedding."""

from __future__ import annotations

import pytest

from tests.conftest import Prove

pytestmark = pytest.mark.long


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("beside", [[], ["tensor-parallel"]], ids=["one process", "two tensor-parallel processes"])
def test_the_operator_trains_as_megatron(prove: Prove, dtype: str, beside: list[str]) -> None:
    assert prove("rotary-embedding", *beside, world={"dtype": dtype}).problems == []


def test_the_operator_is_called_again_in_recompute(prove: Prove) -> None:
    full = {"recompute": {"granularity": "full", "method": "uniform", "num_layers": 1}}
    assert prove("rotary-embedding", "recompute", settings=full).problems == []
