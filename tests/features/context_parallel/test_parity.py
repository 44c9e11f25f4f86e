"""Every algorithm of context parallelism against stock Megatron in one process, alone and beside other layouts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import Prove

pytestmark = pytest.mark.long

ALGORITHMS = ["ring-attention", "ulysses-attention", "kv-allgather-cp"]


def cp(size: int, **settings: Any) -> dict[str, dict[str, Any]]:
    return {"context-parallel": {"size": size}, **settings}


@pytest.mark.guards(47, processes=True)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_share_of_the_sequence_trains_as_the_whole(prove: Prove, algorithm: str, size: int) -> None:
    assert prove(algorithm, settings=cp(size)).problems == []


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_it_does_with_rotary_positions_and_few_key_heads(prove: Prove, algorithm: str) -> None:
    world = {"normalization": "RMSNorm", "num_query_groups": 2}
    assert prove(algorithm, "rms-norm", settings=cp(2), world=world).problems == []


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_it_does_in_bf16(prove: Prove, algorithm: str) -> None:
    assert prove(algorithm, settings=cp(2), world={"dtype": "bf16"}).problems == []


@pytest.mark.parametrize(("size", "window"), [(4, 1), (8, 2)])
def test_neighbours_that_trade_heads_in_a_ring_do_as_well(prove: Prove, size: int, window: int) -> None:
    settings = cp(size, **{"hybrid-attention": {"ulysses_degree": 2, "window": window}})
    assert prove("hybrid-attention", settings=settings, world={"seq_length": 32}, nproc=size).problems == []


BESIDE = {
    "tensor-parallel": ({"tensor-parallel": {"size": 2}}, ["tensor-parallel", "sequence-parallel"]),
    "pipeline-parallel": ({"pipeline-parallel": {"size": 2}}, ["pipeline-parallel"]),
    "distributed-optimizer": ({}, ["distributed-optimizer", "async-ddp", "async-param-gather"]),
    "recompute": ({"recompute": {"granularity": "full", "method": "uniform", "num_layers": 1}}, ["recompute"]),
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("other", BESIDE)
def test_it_does_beside_other_layouts(prove: Prove, algorithm: str, other: str) -> None:
    settings, features = BESIDE[other]
    assert prove(algorithm, *features, settings=cp(2, **settings)).problems == []


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (2, {"keep": "half", "second_communicator": True}),
        (4, {"window": 2, "keep": "full"}),
        (3, {"second_communicator": True}),
        (2, {"keep": "full", "interval": 1}),
    ],
)
def test_settings_of_the_ring_change_nothing(prove: Prove, size: int, settings: dict[str, Any]) -> None:
    world = {"seq_length": 48} if size == 3 else None
    given = cp(size, **{"ring-attention": settings})
    assert prove("ring-attention", settings=given, world=world, nproc=size).problems == []


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("settings", [{"keep": "full", "interval": 1}, {"keep": "half", "kv_allgather": True}])
def test_what_ulysses_fetches_again_changes_nothing(prove: Prove, size: int, settings: dict[str, Any]) -> None:
    given = cp(size, **{"ulysses-attention": settings})
    world = {"normalization": "RMSNorm", "num_query_groups": 1}
    assert prove("ulysses-attention", settings=given, world=world).problems == []


def test_a_hybrid_keeps_blocks_of_its_ring(prove: Prove) -> None:
    settings = cp(4, **{"hybrid-attention": {"ulysses_degree": 2, "keep": "full", "interval": 1}})
    assert prove("hybrid-attention", settings=settings).problems == []


def test_it_keeps_fewer_activations(prove: Prove) -> None:
    whole, shared = prove("ring-attention", settings=cp(2)).proof.bytes["saved activations"]
    assert shared < 0.55 * whole
