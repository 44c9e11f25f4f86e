"""Row G6: a ring of ranks emulated on one GPU, against one call of flash attention to the whole sequence.

Every rank is a thread that runs the ring's own code; what they send one another is copied on the device, which stands for a
link that is never the bottleneck. All kernels run on one stream, so the time of the emulation is the work of all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.accelerator.measuring import Work
from benchmarks.accelerator.operation import Case, device, randn
from mindspeed.context_parallel import ring
from mindspeed.context_parallel.blocks import Scoring
from mindspeed.context_parallel.exchange import Exchange
from mindspeed.context_parallel.layout import zigzag
from mindspeed.context_parallel.ring import Rounds

RANKS: Final = 8
SHARE: Final = 8192
"""Tokens of a rank."""
HEADS, GROUPS, WIDTH = 32, 4, 128
IDEAL: Final = 0.95
PATIENCE: Final = 60
"""Seconds that a rank waits for another, which may have failed."""


@dataclass(frozen=True)
class Links:
    """What is on its way from one rank to another, in the order of sending."""

    queues: dict[tuple[int, int], SimpleQueue[Tensor]] = field(default_factory=lambda: defaultdict(SimpleQueue))


@dataclass(frozen=True)
class Arriving:
    """Stands for a posted exchange."""

    queue: SimpleQueue[Tensor]

    def wait(self) -> Tensor:
        return self.queue.get(timeout=PATIENCE)


@dataclass(frozen=True)
class Member:
    """Stands for one rank's process group and for its exchange."""

    place: int
    links: Links

    @property
    def group(self) -> Member:
        return self

    def rank(self) -> int:
        return self.place

    def post(self, sent: Tensor, to: int, source: int) -> Arriving:
        self.links.queues[self.place, to].put(sent.clone())
        return Arriving(self.links.queues[source, self.place])


class Context:
    """Stands for autograd's, whose one thread for a device cannot wait for another rank's backward."""

    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors


def emulated(tensors: Sequence[Tensor], dout: Tensor, ranks: int) -> list[Tensor]:
    """Result and gradients of causal attention of [tokens, batch, heads, width] by a ring of ``ranks``."""
    layout, links = zigzag(ranks), Links()
    plan = partial(_plan, Scoring(tensors[0].shape[-1] ** -0.5), layout, Rounds(ranks))

    def rank(place: int) -> list[Tensor]:
        query, key, value, given = (layout.take(x.detach(), place) for x in (*tensors, dout))
        context = cast(Any, Context())
        out = ring._Ring.forward(context, query, key, value, plan(Member(place, links)))
        return [out, *ring._Ring.backward(context, given)[:3]]

    with ThreadPoolExecutor(ranks) as threads:
        shares = list(threads.map(rank, range(ranks)))
    return [layout.restore([share[n] for share in shares]) for n in range(4)]


def _plan(rule: Scoring, layout: Any, rounds: Rounds, member: Member) -> Any:
    return ring._Plan(rule, layout, rounds, cast(Exchange, member), cast(Exchange, member), "none")


def _flash(tensors: Sequence[Tensor], dout: Tensor, backends: Sequence[SDPBackend]) -> list[Tensor]:
    with sdpa_kernel(list(backends)):
        views = [x.permute(1, 2, 0, 3) for x in tensors]
        out = F.scaled_dot_product_attention(*views, is_causal=True, enable_gqa=True).permute(2, 0, 1, 3)
    return [out.detach(), *torch.autograd.grad(out, tuple(tensors), dout)]


def _work(small: bool) -> Work:
    length, heads, groups, width = (RANKS * 6, 4, 2, 16) if small else (RANKS * SHARE, HEADS, GROUPS, WIDTH)
    tensors = [randn(length, 1, n, width) for n in (heads, groups, groups)]
    dout = torch.randn_like(tensors[0])
    backends = [SDPBackend.MATH] if device().type == "cpu" else [SDPBackend.FLASH_ATTENTION]
    flash: Callable[[], Any] = partial(_flash, tensors, dout, backends)
    flops = 3.5 * 2 * length**2 * heads * width
    ours = partial(emulated, tensors, dout, RANKS)
    return Work(
        ours, flash, {"SDPA flash": flash}, torch.bfloat16, flops=flops, targets={"SDPA flash": IDEAL}, tolerance=2.5e-2
    )


WHAT: Final = f"ring of {RANKS} emulated, causal, {HEADS} and {GROUPS} heads of {WIDTH}, {SHARE} tokens a rank, both ways"
CASES: list[Case] = [Case("G6", WHAT, _work)]
