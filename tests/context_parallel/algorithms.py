"""Every algorithm of context parallelism by name, as what a rank holds and a function of its share."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed.context_parallel import costs
from mindspeed.context_parallel.layout import Layout, contiguous, nested, zigzag
from mindspeed.context_parallel.ring import ring_attention
from mindspeed.features.adaptive_cp.attention import adaptive_attention, plan_mask
from mindspeed.features.adaptive_cp.schedule import schedule
from mindspeed.features.hybrid_attention.attention import hybrid_attention
from mindspeed.features.kv_allgather_cp.attention import kv_allgather_attention
from mindspeed.features.ulysses_attention.attention import ulysses_attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Algorithm:
    """``kind`` and its settings. ``inner`` ranks exchange heads; masks are those of the adaptive one."""

    kind: Literal["ring", "ulysses", "hybrid", "kv-allgather", "adaptive"]
    window: int = 1
    keep: Literal["none", "half", "full"] = "none"
    second: bool = False
    inner: int = 1
    mask: Literal["full", "causal", "window"] = "full"

    def layout(self, world: int) -> Layout:
        if self.kind in ("ulysses", "adaptive"):
            return contiguous(world)
        return nested(zigzag(world // self.inner), self.inner)

    def attend(self, tokens: int) -> Attend:
        """The function of this rank's share of a sequence of ``tokens``; called on all ranks at once, as it makes groups."""
        rank, world, everyone = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
        if self.kind == "ring":
            second = dist.new_group(list(range(world))) if self.second else None
            return partial(_ring, group=everyone, window=self.window, keep=self.keep, second_group=second)
        if self.kind == "ulysses":
            return partial(_ulysses, group=everyone)
        if self.kind == "kv-allgather":
            return partial(_gathered, group=everyone)
        if self.kind == "adaptive":
            return partial(_adaptive, group=everyone, plan=plan_mask(hidden(self.mask, tokens), world))
        near = [dist.new_group(list(range(n, n + self.inner))) for n in range(0, world, self.inner)][rank // self.inner]
        far = [dist.new_group(list(range(n, world, self.inner))) for n in range(self.inner)][rank % self.inner]
        return partial(_hybrid, inner=near, attend=partial(_ring, group=far, window=self.window))

    def sent(self, a: costs.Attention, world: int, rank: int) -> costs.SentBytes:
        """Bytes that ``rank`` sends, by the closed forms; fp64 is not among the types that they know."""
        if self.kind == "ring":
            whole = costs.ring(a, world)
            spared = {"none": 0, "half": a.width, "full": a.width + a.value_width}[self.keep]
            return costs.SentBytes(whole.forward, whole.backward - (world - 1) * a.tokens * a.groups * spared * a.element)
        if self.kind == "ulysses":
            return costs.ulysses(a, world)
        if self.kind == "kv-allgather":
            return costs.gathered(a, world)
        if self.kind == "hybrid":
            return costs.hybrid(a, self.inner, world // self.inner)
        return _blocks_sent(self.mask, a, world, rank)


def _ring(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Tensor:
    return ring_attention(q, k, v, **keywords)


def _ulysses(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Tensor:
    return ulysses_attention(q, k, v, **keywords)


def _gathered(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Tensor:
    return kv_allgather_attention(q, k, v, **keywords)


def _adaptive(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Tensor:
    return adaptive_attention(q, k, v, **keywords)


def _hybrid(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Tensor:
    return hybrid_attention(q, k, v, **keywords)


def hidden(mask: str, tokens: int) -> Tensor:
    """The mask of that name, True where hidden: no key, those behind, or also those an eighth of the sequence before."""
    seen = torch.ones(tokens, tokens, dtype=torch.bool)
    return ~{"full": seen, "causal": seen.tril(), "window": seen.tril().triu(1 - tokens // 8)}[mask]


def _blocks_sent(mask: str, a: costs.Attention, world: int, rank: int) -> costs.SentBytes:
    """Adaptive: keys and values to who computes a block and their gradients back, or queries there and results back."""
    pairs = (~hidden(mask, 8 * world)).view(world, 8, world, 8).sum((1, 3))
    query, out = a.tokens * a.heads * a.width, a.tokens * a.heads * a.value_width
    statistics = a.tokens * a.heads * costs.WIDE
    forward = backward = 0
    for block in (block for turn in schedule(pairs.tolist()) for block in turn):
        if block.moves_keys and rank == block.key:
            forward, backward = forward + a.block * a.element, backward + a.block * a.element
        if block.moves_keys and rank == block.where:
            backward += a.block * costs.WIDE
        if block.moves_queries and rank == block.query:
            forward, backward = forward + query * a.element, backward + (query + 2 * out) * a.element + statistics
        if block.moves_queries and rank == block.where:
            forward, backward = forward + out * costs.WIDE + statistics, backward + query * costs.WIDE
    return costs.SentBytes(forward, backward)


def algorithms(world: int) -> dict[str, Algorithm]:
    """All of them with all their settings on ``world`` ranks, which are even."""
    found = {
        "ring": Algorithm("ring"),
        "ring, keys kept": Algorithm("ring", keep="half"),
        "ring, keys and values kept": Algorithm("ring", keep="full"),
        "ring, two communicators": Algorithm("ring", second=True),
        "double ring": Algorithm("ring", window=2),
        "ulysses": Algorithm("ulysses"),
        "kv-allgather": Algorithm("kv-allgather"),
        "adaptive, all seen": Algorithm("adaptive"),
        "adaptive, causal": Algorithm("adaptive", mask="causal"),
        "adaptive, sliding window": Algorithm("adaptive", mask="window"),
        "hybrid, all trade": Algorithm("hybrid", inner=world),
        "hybrid, none trade": Algorithm("hybrid"),
    }
    if world > 2:
        found["hybrid"] = Algorithm("hybrid", inner=2)
        found["hybrid, double ring"] = Algorithm("hybrid", window=world // 2)
    return found
