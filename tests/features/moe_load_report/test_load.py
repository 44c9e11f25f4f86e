from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed.features.moe_load_report.load import watch


class Router(torch.nn.Module):
    config = SimpleNamespace(moe_router_topk=2)

    def forward(self, routing_map: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return routing_map.float(), routing_map


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router()


def routed(*tokens: tuple[int, ...]) -> Any:
    chosen = torch.zeros(len(tokens), 4, dtype=torch.bool)
    for token, experts in enumerate(tokens):
        chosen[token, list(experts)] = True
    return chosen


def test_rows_are_counted_until_they_are_read():
    chunk = torch.nn.Sequential(Layer(), Layer())
    load = watch([chunk])
    assert load.read() == {}
    chunk[0].router(routed((0, 1), (0, 2), (0,), (0, 1)))  # type: ignore[operator, union-attr]
    chunk[1].router(routed((0, 1), (2, 3), (0, 1), (2, 3)))  # type: ignore[operator, union-attr]
    assert load.read() == pytest.approx({"max_over_mean": 16 / 7, "mean_max_over_mean": 23 / 14, "idle": 1, "dropped": 1 / 16})
    assert load.read() == {}


class OwnGate(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.routing_listeners: list[Any] = []


def test_layers_with_a_gate_of_their_own_tell_what_they_keep():
    layer = OwnGate()
    load = watch([torch.nn.Sequential(Layer(), layer)])
    for listen in layer.routing_listeners:
        listen(routed((0, 1), (0,), (2, 3), ()))
    assert load.read() == pytest.approx({"max_over_mean": 1.6, "mean_max_over_mean": 1.6, "idle": 0, "dropped": 3 / 8})
    layer.eval()
    layer.routing_listeners[0](routed((0, 1)))
    assert load.read() == {}


def test_evaluation_is_not_counted():
    layer = Layer().eval()
    load = watch([layer])
    layer.router(routed((0, 1)))
    assert load.read() == {}
