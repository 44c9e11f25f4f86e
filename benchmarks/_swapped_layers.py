"""Layers that take a while, whose storages are on the host between forward and backward, by transfers that take a while."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mindspeed.features.device_emulation import collective_log
from mindspeed.features.device_emulation import transfers as emulated
from mindspeed.memory import transfers
from mindspeed.memory.swap import LayerSwap

LAYERS, ROWS, SIZE = 4, 64, 32
INNER = ROWS * SIZE * 4
DELAY = 0.02
COMPUTE = 0.03
STEPS = 3


class Pause(torch.autograd.Function):
    """Time that a computation takes, forward and backward."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


class Layer(torch.nn.Module):
    """Two linear layers and a pause, which give away what is between them."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.first, self.second = torch.nn.Linear(SIZE, SIZE), torch.nn.Linear(SIZE, SIZE)

    def forward(self, x, swap=None, seconds=0.0, last=False):
        inner = self.first(x).exp()
        output = self.second(inner)
        left = swap is not None and not last
        if left:
            swap.leave([inner.untyped_storage()], output)
        hidden = x + Pause.apply(output, seconds) * 0.01
        if swap is not None:
            swap.layer_ended(hidden, left)
        return hidden


def train(
    swap: LayerSwap | None, seconds: float = 0.0, order: tuple[int, ...] = (0, 1), steps: int = 1, ends: bool = False
) -> list[Any]:
    """Return every gradient of two passes in flight through four layers, whose backward passes run in ``order``.

    With ``ends`` the last layer is the one before the loss, and keeps what it has.
    """
    layers = [Layer(number) for number in range(LAYERS)]
    torch.manual_seed(9)
    inputs = torch.randn(len(order), ROWS, SIZE).requires_grad_()
    for _ in range(steps):
        if swap is not None:
            swap.begin_step()
        outputs = []
        for number, x in enumerate(inputs):
            if swap is not None:
                swap.begin(number)
            for layer in layers:
                x = layer(x, swap, seconds, last=ends and layer is layers[-1])
            if swap is not None:
                swap.end()
            outputs.append(x.square().sum())
        for number in order:
            if swap is not None:
                swap.enter_backward()
            outputs[number].backward()
    return [inputs.grad, *(parameter.grad for layer in layers for parameter in layer.parameters())]


def overlapped() -> None:
    """Train with transfers that the pauses of the layers can hide."""
    train(LayerSwap(), COMPUTE, order=(1, 0), steps=STEPS, ends=True)


@contextmanager
def slow_copies(log: str) -> Iterator[None]:
    """Have copies between device and host take `DELAY`, and be logged."""
    plain, path, delay = transfers.transfer, collective_log.PATH, emulated.DELAY
    collective_log.PATH, emulated.DELAY = log, DELAY
    transfers.transfer = emulated.logged(emulated.delayed(plain))  # type: ignore[assignment]
    try:
        yield
    finally:
        transfers.transfer, collective_log.PATH, emulated.DELAY = plain, path, delay


def hidden_share(path: Path) -> float:
    """Return the share of the transfers of `overlapped` that nobody waited for, by their launch/wait log."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    waits = [row["blocked"] for row in rows if row["event"] == "wait"]
    assert {row["kind"] for row in rows if row["event"] == "launch"} == {"to host", "to device"}
    assert len(waits) == 2 * (LAYERS - 1) * 2 * STEPS
    return 1 - sum(waits) / (len(waits) * DELAY)
