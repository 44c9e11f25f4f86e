"""One layer with a capacity on every rank of a group, its transfers timed, waited for early, or not waited for."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks._moe_layer import Kept, Shape, build, plan_of
from benchmarks._virtual_time import virtual_time
from tests.moe.faults import waits_at_once, without_wait


@dataclass(frozen=True)
class Run:
    """A layer of ``experts`` on ``tokens`` of a rank, unpiped with 0 ``parts``.

    ``early`` waits at each post, ``skip`` leaves out the wait of that number.
    """

    experts: int = 4
    parts: int = 0
    streams: bool = False
    tokens: int = 48
    early: bool = False
    skip: int = -1


@dataclass
class Measured:
    """Results and gradients, time of transfers that is not hidden, kept bytes and the number of waits."""

    values: list[Tensor]
    exposed: float
    kept: int
    waits: int


def plan(tp: int = 1, **cpu: Any) -> Any:
    """A plan of experts in units on 2 x ``tp`` ranks; a run chooses others."""
    settings: dict[str, dict[str, Any]] = {
        "pipe-experts": {"parts": 2},
        "deepspeed-moe": {"capacity_factor": 1.25},
        "cpu-platform": cpu,
    }
    return plan_of("pipe-experts", "deepspeed-moe-rearrange", settings=settings, tp=tp)


def measure(runs: list[Run]) -> list[Measured]:
    """Measure one run after another, with an all-reduce behind each that divides their transfers in a log."""
    measured = []
    for run in runs:
        measured.append(_measure(run))
        dist.all_reduce(torch.zeros(1), async_op=True).wait()
    return measured


def _measure(run: Run) -> Measured:
    """Forward and backward. The products of forward take twice the time of dispatch and gather."""
    shape = Shape(experts=run.experts, tokens=run.tokens)
    layer = build(shape, torch.float32)
    layer.options = replace(layer.options, parts=run.parts, streams=run.streams)
    draw = torch.Generator("cpu").manual_seed(100 + dist.get_rank())
    x = torch.randn(shape.tokens, 1, shape.hidden, generator=draw).requires_grad_()
    dy = torch.randn(shape.tokens, 1, shape.hidden, generator=draw)
    groups = layer.groups(shape.tokens, 1)
    rows = shape.experts * groups * layer.options.capacity(shape.tokens // groups, shape.experts, shape.topk, True)
    products = 3 * rows * shape.hidden * shape.width
    ranks, sharing = layer.ep_group.size(), layer.ranks.tensor_group.size()
    sent = rows * shape.hidden * 4 * ((ranks - 1) / ranks + sharing - 1)
    kept = Kept(layer)
    with virtual_time(products / 2, sent) as clock, ExitStack() as faults:
        ended = faults.enter_context(without_wait(run.skip))
        if run.early:
            faults.enter_context(waits_at_once())
        with kept:
            y = layer(x)[0]
        y.backward(dy)
    gradients = [parameter.grad for parameter in layer.parameters()]
    return Measured([y.detach(), x.grad, *gradients], clock.total("wait"), kept.bytes, len(ended))  # type: ignore[list-item]
