"""The layer in chunks against the same layer in one piece, with equal groups on both sides."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import Prove

pytestmark = pytest.mark.long

SPLIT = ("ampipe", "expert-parallel")


def settings(groups: int = 4, parts: int = 2, **more: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {"ampipe": {"parts": parts}, "deepspeed-moe": {"groups": groups}, **more}


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_chunks_are_the_layer(prove: Prove, dtype: str, parts: int) -> None:
    assert prove(*SPLIT, settings=settings(parts=parts), world={"ep": 2, "dtype": dtype}, nproc=2).problems == []


def test_slices_of_the_rows_of_tensor_ranks(prove: Prove) -> None:
    names = (*SPLIT, "tensor-parallel", "sequence-parallel")
    given = settings(**{"expert-parallel": {"expert_tensor_size": 1}})
    assert prove(*names, settings=given, world={"ep": 2, "tp": 2}, nproc=2).problems == []


@pytest.mark.parametrize("overlap", [False, True])
def test_tensor_ranks_that_share_experts(prove: Prove, overlap: bool) -> None:
    names = (*SPLIT, "tensor-parallel", "sequence-parallel")
    given = settings(**{"expert-parallel": {"expert_tensor_size": 2}})
    given["ampipe"]["overlap"] = overlap
    assert prove(*names, settings=given, world={"ep": 2, "tp": 2}, nproc=4).problems == []


def test_attention_with_scores(prove: Prove) -> None:
    names = (*SPLIT, "flash-attention")
    assert prove(*names, settings=settings(), world={"ep": 2}, nproc=2).problems == []


@pytest.mark.parametrize("other", ["deepspeed-moe-rearrange", "deepspeed-moe-dropless"])
def test_other_tables(prove: Prove, other: str) -> None:
    assert prove(*SPLIT, also=(other,), settings=settings(), world={"ep": 2}, nproc=2).problems == []


def test_with_the_distributed_optimizer_and_hooks_of_buckets(prove: Prove) -> None:
    features = ("distributed-optimizer", "async-ddp", "async-param-gather")
    assert prove(*SPLIT, *features, settings=settings(), world={"ep": 2}, nproc=4).problems == []


def test_recomputed_layers(prove: Prove) -> None:
    given = settings(recompute={"granularity": "full", "method": "uniform", "num_layers": 1})
    assert prove(*SPLIT, "recompute", settings=given, world={"ep": 2}, nproc=2).problems == []


@pytest.mark.parametrize("vpp", [1, 2])
def test_stages_of_a_pipeline(prove: Prove, vpp: int) -> None:
    features = ("pipeline-parallel", *(["virtual-pipeline"] if vpp > 1 else []))
    assert prove(*SPLIT, *features, settings=settings(), world={"ep": 2, "pp": 2, "vpp": vpp}, nproc=4).problems == []


@pytest.mark.parametrize("parts", [2, 4])
def test_layers_of_megatrons_router_in_bf16(prove: Prove, parts: int) -> None:
    given = {"ampipe": {"parts": parts}}
    assert prove("ampipe", "moe-alltoall-overlap", settings=given, world={"ep": 2, "dtype": "bf16"}, nproc=2).problems == []


@pytest.mark.parametrize("more", [(), ("moe-shared-experts",)], ids=["", "shared experts"])
def test_layers_of_megatrons_router(prove: Prove, more: tuple[str, ...]) -> None:
    given = {"moe-shared-experts": {"count": 1}} if more else {}
    assert prove("ampipe", "moe-alltoall-overlap", *more, settings=given, world={"ep": 2}, nproc=2).problems == []
