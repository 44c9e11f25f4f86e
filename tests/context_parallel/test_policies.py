"""Policies for backward: what is kept and what is sent again are their closed forms, and not one bit of a result changes."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType

import mindspeed
from mindspeed.context_parallel import costs
from mindspeed.context_parallel.conditions import keeps
from mindspeed.context_parallel.layout import contiguous, zigzag
from mindspeed.features.ring_attention.layers import RingCoreAttention
from mindspeed.plugins import World
from mindspeed.workbench.verification.pool import WorkerPool
from tests.context_parallel.policies import Run, runs
from tests.context_parallel.shards import made, shape

RING = "mindspeed.context_parallel.ring:ring_attention"
ULYSSES = "mindspeed.features.ulysses_attention.attention:ulysses_attention"
WORLDS = [2, pytest.param(4, marks=pytest.mark.long)]
KEEP: list[costs.Keep] = ["none", "half", "full"]


def all_runs(pool: WorkerPool, world: int, name: str, tensors: Any, policies: list[dict[str, Any]]) -> list[list[Run]]:
    layout = contiguous(world) if name == ULYSSES else zigzag(world)
    found: list[list[Run]] = pool.call(runs, world, name, layout, tensors, policies, plan=mindspeed.plan(platform="cpu"))
    return found


def kept_by_ring(a: costs.Attention, ranks: int, keep: costs.Keep = "none") -> int:
    """Bytes of inputs, result and statistics that backward finds, and of the blocks of others that are kept for it."""
    return a.own + (ranks - 1) * a.named(keep) * a.element


def kept_by_ulysses(a: costs.Attention, ranks: int, keep: costs.Keep = "none") -> int:
    """Bytes that backward finds: those of a share of the heads, and of what is kept as it was."""
    inside = costs.head_all_to_all(a, ranks)
    return inside.own - (inside.named(keep) - a.named(keep)) * a.element


def assert_equal(run: Run, other: Run) -> None:
    assert all(torch.equal(one, same) for one, same in zip(run[0], other[0], strict=True))


@pytest.mark.parametrize("world", WORLDS)
def test_what_a_ring_keeps_it_does_not_send_again(pool: WorkerPool, world: int) -> None:
    tensors = made(world * 6, 2, 4, 4, 8, 4, torch.bfloat16)
    for found in all_runs(pool, world, RING, tensors, [{"keep": keep} for keep in KEEP]):
        for keep, run in zip(KEEP, found, strict=True):
            expected = costs.ring(shape(tensors, world), world, keep)
            _, forward, backward, kept = run
            assert (forward["send"], backward["send"]) == (expected.forward, expected.backward)
            assert kept == kept_by_ring(shape(tensors, world), world, keep)
            assert_equal(run, found[0])


@pytest.mark.parametrize("groups", [2, 1])
@pytest.mark.parametrize("world", WORLDS)
def test_ulysses_keeps_less_for_what_it_fetches_again(pool: WorkerPool, world: int, groups: int) -> None:
    tensors = made(world * 6, 2, 8, groups, 8, 4, torch.bfloat16)
    cases = list(product(KEEP, [False, True] if groups == 1 else [False]))
    policies = [{"keep": keep, "kv_allgather": gather} for keep, gather in cases]
    for found in all_runs(pool, world, ULYSSES, tensors, policies):
        for (keep, gather), run in zip(cases, found, strict=True):
            expected = costs.ulysses(shape(tensors, world), world, keep)
            sides = [{kind: size * (world - 1) // world for kind, size in side.items()} for side in run[1:3]]
            assert [sum(side.values()) for side in sides] == [expected.forward, expected.backward]
            assert [side.get("all_gather", 0) > 0 for side in sides] == [gather, gather and keep != "none"]
            assert run[3] == kept_by_ulysses(shape(tensors, world), world, keep)
            assert_equal(run, found[0])


@pytest.mark.parametrize("name", [RING, ULYSSES])
@pytest.mark.parametrize("world", WORLDS)
def test_dropout_drops_the_same_again(pool: WorkerPool, world: int, name: str) -> None:
    tensors = made(world * 6, 2, 8, 1, 8, 4, torch.bfloat16)
    policies: list[dict[str, Any]] = [{"keep": keep, "dropout": 0.3} for keep in KEEP]
    policies += [{**policy, "kv_allgather": True} for policy in policies] if name == ULYSSES else []
    whole, *found = zip(*all_runs(pool, world, name, tensors, [{}, *policies]), strict=True)
    for kept in found:
        for run, first, undropped in zip(kept, found[0], whole, strict=True):
            assert_equal(run, first)
            assert not torch.equal(run[0][0], undropped[0][0])


def test_what_ulysses_saves_is_the_copies_of_key_heads() -> None:
    a = costs.Attention(128, 32, 2, 64, 64, 2)
    saved = kept_by_ulysses(a, 8) - kept_by_ulysses(a, 8, "full")
    assert saved == 3 * a.block * a.element
    assert kept_by_ulysses(a, 2) == kept_by_ulysses(a, 2, "full")


@pytest.mark.parametrize(("interval", "layers"), [(0, [1, 2, 3, 4, 5, 6, 7]), (1, [1, 3, 5, 7]), (2, [1, 4, 7]), (6, [1])])
def test_an_interval_leaves_layers_out(interval: int, layers: list[int]) -> None:
    assert [number for number in range(1, 8) if keeps(number, interval)] == layers


@pytest.mark.parametrize(
    ("pattern", "numbers"),
    [
        ("", {1: 1, 2: 2, 3: 3}),
        ("*-*-|*-*-", {1: 1, 3: 2, 5: 3, 7: 4}),
        ("-*|-*-*", {2: 1, 4: 2, 6: 3}),
        ("M-M*/*-", {4: 1, 1: 1}),  # a layer of multi-token prediction has a number of its own
    ],
)
def test_attention_layers_of_a_pattern_are_counted_over_all_stages(pattern: str, numbers: dict[int, int]) -> None:
    config, groups = SimpleNamespace(attention_dropout=0.0), SimpleNamespace(cp=object())
    feature: Any = SimpleNamespace(world=World({"hybrid_layer_pattern": pattern}))
    kind = (AttnMaskType.causal, "self")
    cores = {at: RingCoreAttention(config, at, *kind, pg_collection=groups, feature=feature) for at in numbers}
    assert {at: core.attention_number for at, core in cores.items()} == numbers
