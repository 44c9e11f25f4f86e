"""What each rank does: the algorithms on its share of one sequence, forward and backward, held to one process and timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.sequences.turns import Sample, turns
from mindspeed.context_parallel.blocks import Scoring
from mindspeed.context_parallel.layout import Layout, contiguous, zigzag
from mindspeed.context_parallel.local_attention import attention
from mindspeed.context_parallel.ring import ring_attention
from mindspeed.features.hybrid_attention.attention import hybrid_attention, nested
from mindspeed.features.kv_allgather_cp.attention import kv_allgather_attention
from mindspeed.features.ulysses_attention.attention import ulysses_attention

SHARE: Final = 2048
"""Tokens of a rank."""
HEADS, GROUPS, WIDTH = 4, 2, 64
TURNS: Final = 6
RARE: Final = 3
"""All but the two rings, and wall times, are measured in every third turn only."""
NAIVE_RING: Final = "naive ring"
RINGS: Final = ("ring", NAIVE_RING)
DEGREE: Final = 2
"""Ranks that trade heads inside the hybrid."""
ONE: Final = "one process"
TOLERANCE: Final = 1e-5

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def measured(token: str, share: int = SHARE, repeat: int = TURNS) -> dict[str, list[Sample]]:
    """This rank's samples of every algorithm that its group can do; candidates in turns. Wrong results raise ValueError."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    length = share * dist.get_world_size()
    tensors = [torch.randn(length, 1, heads, WIDTH) for heads in (HEADS, GROUPS, GROUPS, HEADS)]
    candidates = algorithms()
    expected = _passed(_alone, tensors)
    for name, (attend, layout) in candidates.items():
        _check(name, _passed(attend, _shares(layout, tensors)), _shares(layout, expected))
    samples: dict[str, list[Sample]] = {name: [] for name in (ONE, *candidates)}
    for turn in range(repeat):
        rare = turn % RARE == 0
        if rare and dist.get_rank() == 0:
            samples[ONE].append(_timed(_alone, tensors, Path(token), lambda: None, rare))
        for name, (attend, layout) in candidates.items():
            if rare or name in RINGS:
                samples[name].append(_timed(attend, _shares(layout, tensors), Path(token), dist.barrier, rare))
    return samples


def algorithms() -> Mapping[str, tuple[Attend, Layout]]:
    """Functions of this rank's query, key and value, and which tokens each wants. The naive ring is ours with stretches:
    the last rank sees a whole block at every step, so all wait for it."""
    world, ranks = dist.group.WORLD, dist.get_world_size()
    found: dict[str, tuple[Attend, Layout]] = {
        "ring": (_on(ring_attention, world), zigzag(ranks)),
        NAIVE_RING: (_on(ring_attention, world, layout=contiguous(ranks)), contiguous(ranks)),
        "Ulysses": (_on(ulysses_attention, world), contiguous(ranks)),
        "gathering": (_on(kv_allgather_attention, world), zigzag(ranks)),
    }
    if ranks > DEGREE and ranks % DEGREE == 0:
        rank, rings = dist.get_rank(), ranks // DEGREE
        inner = [dist.new_group(range(n * DEGREE, (n + 1) * DEGREE)) for n in range(rings)][rank // DEGREE]
        outer = [dist.new_group(range(n, ranks, DEGREE)) for n in range(DEGREE)][rank % DEGREE]
        attend = partial(hybrid_attention, inner=inner, attend=_on(ring_attention, outer))
        found["hybrid"] = (attend, nested(zigzag(rings), DEGREE))
    return found


def _on(function: Callable[..., Tensor], group: Any, **keywords: Any) -> Attend:
    return lambda q, k, v: function(q, k, v, group, **keywords)


def _alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The whole sequence in one process, by the operator that every block goes through."""
    whole = [(0, q.shape[0])]
    return attention(q, k, v, Scoring(WIDTH**-0.5), whole, whole)


def _shares(layout: Layout, tensors: list[Tensor]) -> list[Tensor]:
    return [layout.take(x, dist.get_rank()) for x in tensors]


def _passed(attend: Attend, tensors: list[Tensor]) -> list[Tensor]:
    """Result and gradients of query, key and value; the last tensor is the gradient of the result."""
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    out = attend(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3])]


def _check(name: str, found: list[Tensor], expected: list[Tensor]) -> None:
    for number, (value, wanted) in enumerate(zip(found, expected, strict=True)):
        largest = float((value - wanted).abs().max() / wanted.abs().max())
        if not largest <= TOLERANCE:
            raise ValueError(f"result {number} of {name} is off by {largest:.2g}; {TOLERANCE:.2g} is allowed")


def _timed(attend: Attend, tensors: list[Tensor], token: Path, together: Callable[[], object], wall: bool) -> Sample:
    together()
    with turns(token) as segments:
        _passed(attend, tensors)
    if not wall:
        return Sample(tuple(segments))
    together()
    begin = time.perf_counter()
    _passed(attend, tensors)
    return Sample(tuple(segments), time.perf_counter() - begin)
