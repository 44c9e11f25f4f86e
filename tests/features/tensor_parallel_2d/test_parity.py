"""Training on a grid against one process, beside the features that it composes with."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import Prove

pytestmark = pytest.mark.long
NAME = "tensor-parallel-2d"
ONE_COLUMN = f"effect of {NAME}: no function of mindspeed.features.tensor_parallel_2d.products was called"
"""All that verification finds where ranks form one column, whose products are Megatron's."""
OVERLAPS = {"overlap_gather": True, "overlap_scatter": True, "overlap_backward": True}


def grid(x: int, y: int, **overlaps: bool) -> dict[str, dict[str, Any]]:
    return {NAME: {"x": x, "y": y, **overlaps}}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("x", "y"), [(1, 2), (2, 1), (2, 2), (1, 4)])
def test_a_grid_trains_as_one_process(prove: Prove, x: int, y: int, dtype: str) -> None:
    world = {"tp": x * y, "dtype": dtype, "normalization": "RMSNorm", "gated_linear_unit": True, "activation": "silu"}
    problems = prove(NAME, settings=grid(x, y), world={**world, "num_query_groups": 2}).problems
    assert [problem.message for problem in problems] == ([] if y > 1 else [ONE_COLUMN])


@pytest.mark.parametrize(("x", "y"), [(1, 2), (2, 2)])
def test_transfers_in_parts_train_as_one_process(prove: Prove, x: int, y: int) -> None:
    world = {"tp": x * y, "seq_length": 64}
    assert prove(NAME, settings=grid(x, y, **OVERLAPS), world=world).problems == []


@pytest.mark.parametrize(
    ("also", "world"),
    [
        (["pipeline-parallel"], {"pp": 2}),
        (["ulysses-attention"], {"cp": 2}),
        (["ring-attention"], {"cp": 2}),
        (["distributed-optimizer", "async-ddp", "async-param-gather"], {"world_size": 4}),
        (["matmul-add"], {}),
        (["expert-parallel"], {"ep": 2}),
        ([], {"mtp_num_layers": 1}),
    ],
    ids=str,
)
def test_it_composes(prove: Prove, also: list[str], world: dict[str, Any]) -> None:
    world = {"tp": 2, "seq_length": 32, **world}
    assert prove(NAME, *also, settings=grid(1, 2), world=world).problems == []


@pytest.mark.parametrize(
    "settings", [{"granularity": "full", "method": "uniform", "num_layers": 1}, {"granularity": "selective"}]
)
def test_it_composes_with_recomputation(prove: Prove, settings: dict[str, Any]) -> None:
    assert prove(NAME, "recompute", settings={**grid(1, 2), "recompute": settings}).problems == []


def test_it_composes_with_multi_latent_attention(prove: Prove) -> None:
    """Against sequence parallelism: Megatron's own differs from one process there."""
    world = {"tp": 2, "seq_length": 64, "multi_latent_attention": True, "rotary": True}
    assert prove(NAME, also=["sequence-parallel"], settings=grid(1, 2), world=world).problems == []
