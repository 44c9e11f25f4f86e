"""Bytes that each algorithm sends, at the process group and on the wire, against the closed forms; and what it keeps."""

from typing import Any

import pytest
import torch

import mindspeed
from mindspeed.context_parallel import costs
from mindspeed.workbench.verification.pool import WorkerPool
from tests.context_parallel.algorithms import Algorithm, algorithms
from tests.context_parallel.shards import made, shape
from tests.context_parallel.watched import Sent, counted, kept_bytes, on_the_wire

LONG = pytest.mark.long
WORLDS = [2, pytest.param(4, marks=LONG)]
MESSAGES = 16384
"""Bytes of gloo's messages about transfers, of all those of a call of forward and backward together."""


def everything(world: int, small: dict[str, Any], large: Any) -> tuple[dict[str, dict[str, Sent]], dict[str, int]]:
    """What this rank counts of small tensors, and what the kernel counts of large ones, in one activation of the platform."""
    return {name: counted(algorithms(world), x) for name, x in small.items()}, on_the_wire(algorithms(world), large)


@pytest.mark.parametrize("world", WORLDS)
def test_every_algorithm_sends_what_its_formula_says(pool: WorkerPool, world: int) -> None:
    small = {f"{groups} key heads": made(world * 8, 2, 4, groups, 8, 4, torch.bfloat16) for groups in (1, 4)}
    large = made(world * 256, 1, 8, 8, 64, 64, torch.float32)
    plan = mindspeed.plan(features=[], platform="cpu")
    for rank, (by_group, by_kernel) in enumerate(pool.call(everything, world, world, small, large, plan=plan)):
        for heads, sent in by_group.items():
            a = shape(small[heads], world)
            expected = {name: algorithm.sent(a, world, rank) for name, algorithm in algorithms(world).items()}
            assert {name: one.bytes for name, one in sent.items()} == {n: (e.forward, e.backward) for n, e in expected.items()}
            assert_calls({name: one.calls for name, one in sent.items()}, world)
        a = shape(large, world)
        for name, algorithm in algorithms(world).items():
            needed = algorithm.sent(a, world, rank).both
            assert needed <= by_kernel[name] <= 1.01 * needed + MESSAGES, name


def assert_calls(calls: dict[str, Any], world: int) -> None:
    """Query, key, value and result each travel in an all-to-all; a ring of R ranks makes R - 1 exchanges."""
    trades, far = {"all_to_all": 4}, world // 2
    assert calls["ulysses"] == calls["hybrid, all trade"] == (trades, trades)
    assert calls["kv-allgather"] == ({"all_gather": 1}, {"all_gather": 1, "reduce_scatter": 1})
    ring = exchanges(world - 1), exchanges(2 * (world - 1))
    assert calls["ring"] == calls["double ring"] == calls["hybrid, none trade"] == ring
    if world > 2:
        assert calls["hybrid"] == (trades | exchanges(far - 1), trades | exchanges(2 * (far - 1)))


def exchanges(count: int) -> dict[str, int]:
    return {"send": count, "recv": count}


def test_a_ring_moves_less_than_ulysses_exactly_when_key_heads_are_few() -> None:
    for ranks in (2, 4, 8, 16):
        for groups in (1, 2, 4, 8, 16):
            a = costs.Attention(128, 64, groups, 64, 64, 2)
            ratio = costs.ring(a, ranks).forward / costs.ulysses(a, ranks).forward
            r = groups / 64
            if groups % ranks == 0:
                assert ratio == pytest.approx(r * ranks / (1 + r))


def kept(a: costs.Attention, algorithm: Algorithm, world: int) -> int:
    """Bytes of query, keys, values, result and the logarithm of each row's sum; of a ring also those it was told to keep."""
    inner = world if algorithm.kind == "ulysses" else algorithm.inner
    a = costs.head_all_to_all(a, inner)
    received = {"none": 0, "half": a.width, "full": a.width + a.value_width}[algorithm.keep] * (world - 1)
    numbers = a.heads * (a.width + a.value_width) + a.groups * (a.width + a.value_width + received)
    return a.tokens * (numbers * a.element + a.heads * costs.WIDE)


@pytest.mark.parametrize("world", WORLDS)
def test_what_is_kept_grows_with_the_own_share_alone(pool: WorkerPool, world: int) -> None:
    """No scores, no keys of other ranks, no key heads repeated for query heads; a constant mask of triangles is shared."""
    cases = {name: one for name, one in algorithms(world).items() if one.mask == "full"}
    tensors = {tokens: made(world * tokens, 2, 8, 4, 8, 4, torch.bfloat16) for tokens in (8, 16)}
    short, long = (pool.call(kept_bytes, world, cases, x) for x in tensors.values())
    for one, two in zip(short, long, strict=True):
        for name, algorithm in cases.items():
            saved = [kept(shape(x, world), algorithm, world) for x in tensors.values()]
            assert [one[name][0], two[name][0]] == saved, name
            if algorithm.kind != "adaptive":  # whose plan holds the mask that it was given
                assert one[name][1] == two[name][1], name
