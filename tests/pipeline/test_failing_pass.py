"""Errors of a pass that runs together with another one."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mindspeed.moe.transfer import TokenTransfer, post, wait
from mindspeed.pipeline.executor import execute
from mindspeed.pipeline.operations import Op, PipelineShape
from mindspeed.pipeline.synthesis import paired
from mindspeed.process.place import PLACE

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have notes since Python 3.11")


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise ValueError("no memory")


class Pending:
    def __init__(self, received: Tensor) -> None:
        self.received = received

    def wait(self) -> Tensor:
        return self.received


class Router(nn.Module):
    def forward(self, x: Tensor, failing: bool) -> Tensor:
        if failing:
            raise ValueError("no memory")
        return x


class Layer(nn.Module):
    """A layer with a transfer before its experts and one behind, as far as errors see it."""

    layer_number = 7

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()

    def forward(self, x: Tensor, failing: str) -> Tensor:
        PLACE.enter(f"layer {self.layer_number}")
        x = self.router(x, failing == "router")
        for behind in ("dispatch", "combine"):
            transfer = TokenTransfer(lambda sent: Pending(sent.clone()), lambda sent: Pending(sent.clone()))
            x = wait(post(x, transfer), transfer)
            if failing == behind:
                x = FailsBackward.apply(x)
        return x


class Stages:
    """One layer per micro-batch; that of micro-batch 1 fails."""

    def __init__(self, failing: str) -> None:
        self.layer, self.failing = Layer(), failing

    def forward(self, op: Op, given: Tensor | None) -> Tensor:
        return self.layer(torch.ones(2, requires_grad=True), self.failing if op.micro_batch == 1 else "")

    def backward(self, op: Op, given: Tensor | None, output: Tensor, gradient: Tensor | None) -> None:
        output.sum().backward()


@pytest.mark.parametrize(
    ("failing", "name", "place"),
    [
        ("router", "forward", ", layer 7: Layer, Router"),
        ("dispatch", "backward", ", after the gradient of transfer 2 of layer 7 was received"),
        ("combine", "backward", ""),
    ],
)
def test_what_a_pass_raises_names_micro_batch_layer_and_part(failing: str, name: str, place: str) -> None:
    schedule = paired(PipelineShape(1, 1, 4))
    assert schedule.pairs[0]
    channels: Any = SimpleNamespace(finish=lambda: None)
    with pytest.raises(ValueError, match="no memory") as raised:
        execute(schedule, 0, Stages(failing), channels)  # type: ignore[arg-type]
    assert raised.value.__notes__ == [f"raised in the {name} pass of micro-batch 1, model chunk 0 (pipeline stage 0){place}"]
