"""The order in which ring attention computes blocks, posts transfers and waits for them, recorded from its code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor

from mindspeed.context_parallel import ring
from mindspeed.context_parallel.blocks import BlockCall, Scoring
from mindspeed.context_parallel.layout import contiguous, zigzag
from mindspeed.ops.attention_mask import attention_visibility
from mindspeed.workbench.exposure.programs import Computation, Event, PeerTransfer, Post, Wait

Direction = Literal["forward", "backward", "both"]
BACKWARD = 2.5
"""Operations of attention in backward, for each of forward."""


@dataclass(frozen=True)
class RingJob:
    """A ring of ``ranks`` with windows of ``window``, each with ``tokens`` of one sequence, and ``heads`` of width ``width``.

    ``shared``: transfers between inner rings are in the queue of those within. Without ``causal`` all blocks have equal work.
    """

    ranks: int
    window: int = 1
    shared: bool = False
    causal: bool = True
    tokens: int = 4
    heads: int = 1
    groups: int = 1
    width: int = 2


class _Pending:
    def __init__(self, recorder: _Recorder, number: int, received: Tensor) -> None:
        self._recorder, self._number, self._received = recorder, number, received

    def wait(self) -> Tensor:
        self._recorder.program.append(Wait(self._number))
        return self._received


class _Recorder:
    """Stands in for an exchange and for the kernels of attention."""

    def __init__(self, job: RingJob, rank: int) -> None:
        self.job, self.program, self._rank = job, list[Event](), rank
        self._numbers = 0

    def rank(self) -> int:
        return self._rank

    def exchange(self, communicator: str) -> Any:
        def post(sent: Tensor, to: int, source: int) -> _Pending:
            self._numbers += 1
            parts = (PeerTransfer("send", sent.nbytes, to), PeerTransfer("recv", sent.nbytes, source))
            self.program.append(Post(self._numbers, "block", communicator, tuple(range(self.job.ranks)), parts))
            return _Pending(self, self._numbers, torch.empty_like(sent))

        return SimpleNamespace(post=post, group=self)

    def accumulate(self, running: Any, scoring: Scoring, part: BlockCall, q: Tensor, k: Tensor, v: Tensor) -> BlockCall:
        self._compute("attention", [part], q, k, 1)
        return part

    def add_gradients(
        self, sums: Any, scoring: Scoring, work: Sequence[BlockCall], dout: Tensor, q: Tensor, k: Tensor, *_: Any
    ) -> None:
        self._compute("gradients of attention", work, q, k, BACKWARD)

    def _compute(self, name: str, work: Sequence[BlockCall], q: Tensor, k: Tensor, times: float) -> None:
        tiles = [(one.tile.rows, one.tile.columns, one.tile.causal) for one in work]
        pairs = sum((rows[1] - rows[0]) * (columns[1] - columns[0]) / (1 + causal) for rows, columns, causal in tiles)
        self.program.append(Computation(name, times * 4 * pairs * q.shape[2] * q.shape[3]))


def ring_program(job: RingJob, rank: int, direction: Direction) -> list[Event]:
    """Return what a rank does in a forward or a backward pass of one layer, or in both."""
    recorder = _Recorder(job, rank)
    inner = recorder.exchange("ring")
    outer = inner if job.shared else recorder.exchange("between inner rings")
    layout = (zigzag if job.causal else contiguous)(job.ranks)
    scoring = Scoring(1.0, attention_visibility(job.causal, None, ()))
    plan = ring._Plan(scoring, layout, ring.Rounds(job.ranks, job.window), inner, outer, "none")
    q, k, v = (
        torch.empty(job.tokens, 1, heads, job.width, dtype=torch.bfloat16, device="meta")
        for heads in (job.heads, job.groups, job.groups)
    )
    ctx = SimpleNamespace(save_for_backward=lambda *saved: setattr(ctx, "saved_tensors", saved))
    kernels = {"accumulate_block": recorder.accumulate, "add_gradients": recorder.add_gradients}
    with patch.multiple(ring, **kernels):
        out = ring._Ring.forward(ctx, q, k, v, plan)
        if direction == "backward":
            recorder.program.clear()
        if direction != "forward":
            ring._Ring.backward(ctx, out)
    return recorder.program


def ring_programs(job: RingJob, direction: Direction) -> dict[int, list[Event]]:
    """Return the program of every rank."""
    return {rank: ring_program(job, rank, direction) for rank in range(job.ranks)}
