"""One layer with a capacity on every rank of a group, whole or in units: its results, its time and what it keeps."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks._moe_layer import Kept, Shape, build, plan_of
from benchmarks._virtual_time import virtual_time


@dataclass(frozen=True)
class Run:
    """A layer of ``experts`` on ``tokens`` of a rank, unpiped with 0 ``parts``.

    ``early`` waits at each post, ``skip`` leaves out the wait of that number: faults that tests plant.
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
    waits: int = 0


def plan(tp: int = 1, **cpu: Any) -> Any:
    """A plan of experts in units on 2 x ``tp`` ranks; a run chooses others."""
    settings: dict[str, dict[str, Any]] = {
        "pipe-experts": {"parts": 2},
        "deepspeed-moe": {"capacity_factor": 1.25},
        "device-emulation": cpu,
    }
    return plan_of("pipe-experts", "deepspeed-moe-rearrange", settings=settings, tp=tp)


def measure(run: Run) -> Measured:
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
    with virtual_time(products / 2, sent) as clock:
        with kept:
            y = layer(x)[0]
        y.backward(dy)
    gradients = [parameter.grad for parameter in layer.parameters()]
    return Measured([y.detach(), x.grad, *gradients], clock.total("wait"), kept.bytes)  # type: ignore[list-item]


def seconds(shape: Shape, parts: tuple[int, ...], clock: str, passes: int = 15) -> list[float]:
    """The least of a forward and backward pass of a layer, unpiped and in units in turn, by a clock of `time`."""
    layer = build(shape, torch.float32)
    x = torch.randn(shape.tokens, 1, shape.hidden).requires_grad_()
    took: dict[int, list[float]] = {number: [] for number in parts}
    read = getattr(time, clock)
    for _ in range(passes):
        for number, times in took.items():
            layer.options = replace(layer.options, parts=number)
            dist.barrier()
            start = read()
            layer(x)[0].sum().backward()
            times.append(read() - start)
    return [min(times[1:]) for times in took.values()]
