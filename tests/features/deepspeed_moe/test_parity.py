"""The layer against its formula, every expert on every token, in one process; with equal groups on both sides."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import Prove

pytestmark = pytest.mark.long

SPLIT = ("deepspeed-moe", "expert-parallel")
TENSOR = (*SPLIT, "tensor-parallel", "sequence-parallel")


def settings(expert: int | None = None, **gate: Any) -> dict[str, dict[str, Any]]:
    return {"deepspeed-moe": gate} | ({"expert-parallel": {"expert_tensor_size": expert}} if expert else {})


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("factor", [0.5, 1.0, 8.0])
def test_one_process_computes_the_formula(prove: Prove, dtype: str, factor: float) -> None:
    assert prove("deepspeed-moe", settings=settings(capacity_factor=factor), world={"dtype": dtype, "ep": 1}).problems == []


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_experts_are_spread_over_ranks(prove: Prove, dtype: str, ranks: int) -> None:
    assert prove(*SPLIT, world={"ep": ranks, "dtype": dtype}, nproc=ranks).problems == []


@pytest.mark.parametrize(("ep", "expert"), [(2, 1), (1, 2)])
def test_tensor_ranks_have_groups_of_their_own(prove: Prove, ep: int, expert: int) -> None:
    assert prove(*TENSOR, settings=settings(expert, groups=2), world={"ep": ep, "tp": 2}, nproc=2).problems == []


def test_four_ranks_share_and_spread_experts(prove: Prove) -> None:
    assert prove(*TENSOR, settings=settings(2, groups=4), world={"ep": 2, "tp": 2}, nproc=4).problems == []


@pytest.mark.parametrize("vpp", [1, 2])
def test_stages_of_a_pipeline(prove: Prove, vpp: int) -> None:
    features = ("deepspeed-moe", "pipeline-parallel", *(["virtual-pipeline"] if vpp > 1 else []))
    assert prove(*features, world={"ep": 1, "pp": 2, "vpp": vpp}, nproc=2).problems == []


def test_with_the_distributed_optimizer_and_hooks_of_buckets(prove: Prove) -> None:
    features = ("distributed-optimizer", "async-ddp", "async-param-gather")
    assert prove(*SPLIT, *features, world={"ep": 2}, nproc=4).problems == []


@pytest.mark.parametrize("modules", [{"modules": ("moe",)}, {"granularity": "full", "method": "uniform", "num_layers": 1}])
def test_recomputed_layers(prove: Prove, modules: dict[str, Any]) -> None:
    assert prove(*SPLIT, "recompute", settings={"recompute": modules}, world={"ep": 2}, nproc=2).problems == []
