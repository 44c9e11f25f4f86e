"""Bytes that each algorithm sends, counted at the process group, against the closed forms; and what it keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mindspeed
from mindspeed.features._shared.context_parallel import costs
from mindspeed.features._shared.context_parallel.layout import contiguous, zigzag
from mindspeed.verification.pool import WorkerPool
from tests.features._shared.shards import made
from tests.features._shared.watched import bytes_sent, saved_bytes

FEATURES = "mindspeed.features"
RING = f"{FEATURES}.ring_attention.attention.ring_attention"
ULYSSES = f"{FEATURES}.ulysses_attention.attention.ulysses_attention"
GATHERED = f"{FEATURES}.kv_allgather_cp.attention.kv_allgather_attention"
WORLDS = [2, pytest.param(4, marks=pytest.mark.long)]


def counted(pool: WorkerPool, world: int, name: str, tensors: Any, **keywords: Any) -> Any:
    layout = contiguous(world) if name == ULYSSES else zigzag(world)
    plan = mindspeed.plan(features=[], platform="cpu")
    return pool.call(bytes_sent, world, name, layout, tensors, keywords, plan=plan)


def shape(tensors: Any, world: int) -> costs.Attention:
    q, k, v, _ = tensors
    tokens = q.shape[0] // world * q.shape[1]
    return costs.Attention(tokens, q.shape[2], k.shape[2], q.shape[3], v.shape[3], q.element_size())


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("world", WORLDS)
def test_a_ring_sends_what_its_formula_says(pool: WorkerPool, world: int, groups: int) -> None:
    tensors = made(world * 6, 2, 4, groups, 8, 4, torch.bfloat16)
    expected = costs.ring(shape(tensors, world), world)
    for forward, backward in counted(pool, world, RING, tensors):
        assert (forward["send"], backward["send"]) == (expected.forward, expected.backward)
        assert set(forward) | set(backward) == {"send", "recv"}


@pytest.mark.parametrize(("keep", "share"), [("half", 2 / 3), ("full", 1.0)])
def test_what_a_ring_keeps_it_does_not_send_again(pool: WorkerPool, keep: str, share: float) -> None:
    tensors = made(12, 2, 4, 4, 8, 4, torch.bfloat16)
    expected = costs.ring(shape(tensors, 2), 2)
    for forward, backward in counted(pool, 2, RING, tensors, keep=keep):
        assert forward["send"] == expected.forward
        assert backward["send"] == expected.backward - round(expected.forward * share)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("world", WORLDS)
def test_ulysses_sends_what_its_formula_says(pool: WorkerPool, world: int, groups: int) -> None:
    tensors = made(world * 6, 2, 4, groups, 8, 4, torch.bfloat16)
    expected = costs.ulysses(shape(tensors, world), world)
    for forward, backward in counted(pool, world, ULYSSES, tensors):
        sent = [side["all_to_all"] * (world - 1) // world for side in (forward, backward)]
        assert sent == [expected.forward, expected.backward]
        assert set(forward) | set(backward) == {"all_to_all"}


@pytest.mark.parametrize("world", WORLDS)
def test_gathering_sends_what_its_formula_says(pool: WorkerPool, world: int) -> None:
    tensors = made(world * 6, 2, 4, 2, 8, 4, torch.bfloat16)
    expected = costs.gathered(shape(tensors, world), world)
    for forward, backward in counted(pool, world, GATHERED, tensors):
        moved = [forward["all_gather"], backward["all_gather"] + backward["reduce_scatter"]]
        assert [size * (world - 1) // world for size in moved] == [expected.forward, expected.backward]


def test_a_ring_moves_less_than_ulysses_exactly_when_key_heads_are_few() -> None:
    for ranks in (2, 4, 8, 16):
        for groups in (1, 2, 4, 8, 16):
            a = costs.Attention(128, 64, groups, 64, 64, 2)
            ratio = costs.ring(a, ranks).forward / costs.ulysses(a, ranks).forward
            r = groups / 64
            if groups % ranks == 0:
                assert ratio == pytest.approx(r * ranks / (1 + r))


@pytest.mark.parametrize("name", [RING, GATHERED])
@pytest.mark.parametrize("world", WORLDS)
def test_only_the_own_share_is_kept_for_backward(pool: WorkerPool, name: str, world: int) -> None:
    tensors = made(world * 6, 2, 4, 2, 8, 8, torch.bfloat16)
    q, k, v, out = (x.numel() // world * 2 for x in tensors)
    statistics = q // 2 // 8 * 4
    assert pool.call(saved_bytes, world, name, zigzag(world), tensors, {}) == [q + k + v + out + statistics] * world


@pytest.mark.parametrize("world", WORLDS)
def test_ulysses_keeps_its_share_of_the_heads(pool: WorkerPool, world: int) -> None:
    tensors = made(world * 6, 2, 4, 4, 8, 8, torch.bfloat16)
    q, k, v, out = (x.numel() // world * 2 for x in tensors)
    statistics = q // 2 // 8 * 4
    kept = pool.call(saved_bytes, world, ULYSSES, contiguous(world), tensors, {})
    assert kept == [q + k + v + out + statistics] * world
