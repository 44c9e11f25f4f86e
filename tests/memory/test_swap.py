from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from mindspeed.memory.meter import Meter
from mindspeed.memory.parked import Parked
from mindspeed.memory.swap import LayerSwap
from mindspeed.platforms import collective_log, transfers

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


def train(swap: LayerSwap | None, seconds: float = 0.0, order=(0, 1), steps: int = 1, ends: bool = False) -> list[torch.Tensor]:
    """Two passes in flight through four layers, whose backward passes run in ``order``; every gradient.

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


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_gradients_are_bit_equal_in_every_order_of_backward_passes(order):
    assert equal(train(None, order=order, steps=2), train(LayerSwap(), order=order, steps=2))


def test_what_left_is_on_the_host_until_backward():
    swap = LayerSwap()
    layers = [Layer(number) for number in range(LAYERS)]
    x = torch.randn(ROWS, SIZE, requires_grad=True)
    with Meter() as meter:
        swap.begin()
        y = x
        for layer in layers:
            y = layer(y, swap)
        before = meter.live.host
        swap.end()
        assert before - meter.live.host == INNER  # the last layer; each other was freed behind the next
        y.sum().backward()
    assert x.grad is not None


def hidden_share(path: Path) -> float:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    waits = [row["blocked"] for row in rows if row["event"] == "wait"]
    assert {row["kind"] for row in rows if row["event"] == "launch"} == {"to host", "to device"}
    assert len(waits) == 2 * (LAYERS - 1) * 2 * STEPS
    return 1 - sum(waits) / (len(waits) * DELAY)


@pytest.fixture
def log(monkeypatch, tmp_path):
    monkeypatch.setattr(collective_log, "PATH", str(tmp_path / "log.{rank}"))
    monkeypatch.setattr(transfers, "DELAY", DELAY)
    return tmp_path / "log.0"


def overlapped() -> None:
    train(LayerSwap(), COMPUTE, order=(1, 0), steps=STEPS, ends=True)


def test_transfers_are_hidden_behind_the_layers(log):
    overlapped()
    assert hidden_share(log) >= 0.9  # the first step does not know the order of its backward passes


def test_transfers_are_not_hidden_without_the_early_post(log, monkeypatch):
    post = Parked.post
    monkeypatch.setattr(Parked, "post", lambda self: None)
    monkeypatch.setattr(Parked, "wait", lambda self, wait=Parked.wait: _posted_late(self, post, wait))
    overlapped()
    assert hidden_share(log) < 0.6


def _posted_late(parked, post, wait):
    post(parked)
    wait(parked)
