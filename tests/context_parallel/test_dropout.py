"""Dropout of every algorithm: ranks with one random state drop other places, and the mask as recorded explains the result.

Queries and keys that are zero give every visible key one probability, and values that are the unit matrix show which of them
were dropped: from one random state an algorithm draws one mask, whatever its inputs are.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mindspeed.context_parallel.layout import Layout, contiguous, nested, zigzag
from mindspeed.context_parallel.ring import ring_attention
from mindspeed.features.adaptive_cp.attention import adaptive_attention, plan_mask
from mindspeed.features.hybrid_attention.attention import hybrid_attention
from mindspeed.features.kv_allgather_cp.attention import kv_allgather_attention
from mindspeed.features.ulysses_attention.attention import ulysses_attention
from mindspeed.workbench.verification.pool import WorkerPool
from tests.context_parallel.shards import causal, made

KEEP = 0.5
LONG = pytest.mark.long
ALGORITHMS = ["ring", "ulysses", "hybrid", "gathered", "adaptive"]
INNER = {2: 2, 4: 2}
"""Ranks of a head all-to-all in a hybrid, by the number of ranks."""
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def layout_of(name: str, world: int) -> Layout:
    if name == "hybrid":
        return nested(zigzag(world // INNER[world]), INNER[world])
    return zigzag(world) if name in ("ring", "gathered") else contiguous(world)


def attention_of(name: str, tokens: int, causal_: bool) -> Attend:
    """An algorithm over the ranks of this process group."""
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    named: dict[str, Any] = {"dropout": 1 - KEEP, "causal": causal_}
    if name == "ulysses":
        return lambda *x: ulysses_attention(*x, group, **named)
    if name == "adaptive":
        mask = causal(tokens) if causal_ else torch.zeros(tokens, tokens, dtype=torch.bool)
        return lambda *x: adaptive_attention(*x, group, plan_mask(mask, world), dropout=1 - KEEP)
    if name == "hybrid":
        inner = INNER[world]
        near = [dist.new_group(list(range(first, first + inner))) for first in range(0, world, inner)][rank // inner]
        far = [dist.new_group(list(range(first, world, inner))) for first in range(inner)][rank % inner]
        ring = {**named, "layout": zigzag(world // inner)}
        return lambda *x: hybrid_attention(*x, near, lambda *parts: ring_attention(*parts, far, **ring))
    function = ring_attention if name == "ring" else kv_allgather_attention
    return lambda *x: function(*x, group, layout=zigzag(world), **named)


def run(name: str, tensors: Sequence[Tensor], causal_: bool) -> list[list[Tensor]]:
    """Of this rank: what a unit matrix shows; result and gradients; and both once more, recomputed."""
    tokens, layout, rank = tensors[0].shape[0], layout_of(name, dist.get_world_size()), dist.get_rank()
    attend = attention_of(name, tokens, causal_)
    q, k, v, dout = (layout.take(x, rank) for x in tensors)
    unit = torch.eye(tokens, dtype=q.dtype)[:, None, None].expand(tokens, *v.shape[1:3], tokens)
    torch.manual_seed(5)
    shown = attend(torch.zeros_like(q), torch.zeros_like(k), layout.take(unit, rank))
    results = [[shown]]
    for recomputed in (False, True):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        torch.manual_seed(5)
        out = checkpoint(attend, *inputs, use_reentrant=False) if recomputed else attend(*inputs)
        torch.rand(3)  # other numbers are drawn before backward
        out.backward(dout)
        results.append([out.detach(), *(x.grad for x in inputs if x.grad is not None)])
    return results


def recorded(shards: Sequence[Any], layout: Layout, hidden: Tensor | None) -> Tensor:
    """What each probability was multiplied by, [batch, heads, tokens, tokens]; 1 where it is hidden."""
    shown = layout.restore([shard[0][0] for shard in shards]).permute(1, 2, 0, 3)
    seen = torch.ones(shown.shape[2:]).bool() if hidden is None else ~hidden
    factors = shown * seen.sum(1, keepdim=True)
    assert torch.allclose(factors, torch.where(factors > 0.5 / KEEP, 1 / KEEP, 0.0).to(factors.dtype))
    assert not factors[..., ~seen].any()
    return torch.where(seen, factors, 1.0)


def dense(tensors: Sequence[Tensor], factors: Tensor, hidden: Tensor | None) -> list[Tensor]:
    """Result and gradients of one process that multiplies its probabilities by ``factors``."""
    q, k, v = (x.clone().requires_grad_() for x in tensors[:3])
    times = q.shape[2] // k.shape[2]
    scores = torch.einsum("sbnd,tbnd->bnst", q, k.repeat_interleave(times, 2)) * q.shape[-1] ** -0.5
    scores = scores if hidden is None else scores.masked_fill(hidden, -torch.inf)
    out = torch.einsum("bnst,tbnd->sbnd", scores.softmax(-1) * factors, v.repeat_interleave(times, 2))
    out.backward(tensors[3])
    return [out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]


CASES: list[Any] = [(name, 2) for name in ALGORITHMS]
CASES += [pytest.param(name, 3, marks=LONG) for name in ALGORITHMS if name != "hybrid"]
CASES += [pytest.param(name, 4, marks=LONG) for name in ALGORITHMS]


def heads_for(world: int) -> int:
    """A number that the ranks divide."""
    return 6 if world == 3 else 4


@pytest.mark.cover(1, because="every algorithm is in the default run on two ranks")
@pytest.mark.parametrize(("name", "world"), CASES)
def test_it_is_dense_attention_with_the_mask_as_recorded(pool: WorkerPool, name: str, world: int) -> None:
    tensors = made(world * 12, 2, heads_for(world), 2, 4, 6)
    hidden = causal(tensors[0].shape[0])
    shards, layout = pool.call(run, world, name, tensors, True), layout_of(name, world)
    expected = dense(tensors, recorded(shards, layout, hidden), hidden)
    assert len(expected) == 4
    for number, wanted in enumerate(expected):
        found, again = (layout.restore([shard[part][number] for shard in shards]) for part in (1, 2))
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
        assert torch.equal(found, again), "recomputed from another mask"


@pytest.mark.cover(1, because="every algorithm is in the default run on two ranks")
@pytest.mark.parametrize(("name", "world"), CASES)
def test_no_two_ranks_drop_the_same_places(pool: WorkerPool, name: str, world: int) -> None:
    """Every rank starts from one random state. Blocks of independent masks agree in half of their places."""
    tensors = made(world * 12, 2, heads_for(world), 2, 4, 6)
    layout = layout_of(name, world)
    factors = recorded(pool.call(run, world, name, tensors, False), layout, None)
    assert 0.45 < factors.bool().double().mean() < 0.55
    order = layout.restore([torch.full((12,), float(rank)) for rank in range(world)])
    kept = [
        factors[batch, head][order == here][:, order == there].bool()
        for batch in range(2)
        for head in range(factors.shape[1])
        for here in range(world)
        for there in range(world)
    ]
    for number, one in enumerate(kept):
        for other in kept[:number]:
            assert 0.2 < (one == other).double().mean() < 0.8
