import pytest
import torch

from benchmarks._swapped_layers import INNER, LAYERS, ROWS, SIZE, Layer, hidden_share, overlapped, slow_copies, train
from mindspeed.memory.meter import Meter
from mindspeed.memory.parked import Parked
from mindspeed.memory.swap import LayerSwap


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


@pytest.fixture
def log(tmp_path):
    with slow_copies(str(tmp_path / "log.{rank}")):
        yield tmp_path / "log.0"


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
