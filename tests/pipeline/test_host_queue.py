"""The queue of weight gradients on the host: two units on the device, and the same gradients."""

import pytest
import torch
from torch import Tensor, UntypedStorage

from mindspeed.memory.on_host import HostBuffers
from mindspeed.pipeline.host_queue import HostQueue
from mindspeed.pipeline.operations import PipelineShape
from mindspeed.pipeline.synthesis import delayed, lag_by_rank, megatron
from mindspeed.pipeline.weight_gradients import Unit, WeightGradients


class Outer:
    """Product of an input and an output gradient, whose storages count as on the device while they have bytes."""

    def __init__(self, weight: Tensor, given: Tensor, grad_output: Tensor) -> None:
        self.weight, self.given, self.grad_output = weight, given, grad_output

    def storages(self) -> list[UntypedStorage]:
        return [self.given.untyped_storage(), self.grad_output.untyped_storage()]

    def prepare(self) -> None:
        pass

    def add(self, before: Tensor | None) -> Tensor | None:
        gradient = torch.outer(self.given, self.grad_output)
        return gradient if before is None else before + gradient


@pytest.mark.parametrize("lag", [0, 1, 4])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_at_most_two_units_are_on_the_device_and_the_gradients_are_the_same(lag: int, rank: int) -> None:
    ops = delayed(megatron(PipelineShape(4, 1, 12)), lag_by_rank(lag, 4)).ops[rank]
    weight = torch.zeros(3, 3)
    gradients: dict[bool, list[Tensor]] = {False: [], True: []}
    on_device: list[int] = []
    for swaps in (False, True):

        def finished(chunk: int, weight: Tensor, total: Tensor | None, swaps: bool = swaps) -> None:
            assert total is not None
            gradients[swaps].append(total)

        queue = WeightGradients(finished)
        if swaps:
            queue.host = HostQueue(HostBuffers(), queue.storages_of)
        kept: dict[Unit, Outer] = {}
        for kind, *numbers in ops:
            unit = numbers[0], numbers[1]
            if kind == "W":
                queue.run(unit)
                kept.pop(unit)
                continue
            with queue.collected(unit, "forward" if kind == "F" else "backward"):
                if kind == "B":
                    torch.manual_seed(unit[1])
                    shared = torch.randn(3)
                    kept[unit] = Outer(weight, shared, torch.randn(3))
                    queue.push(unit, kept[unit])
                    queue.push(unit, Outer(weight, shared, shared))
                if swaps:
                    on_device.append(sum(product.given.untyped_storage().nbytes() > 0 for product in kept.values()))
        if swaps and queue.host is not None:
            assert queue.host.peak == min(2, max(1, lag * rank + 1))
            assert (queue.host.bytes > 0) == (lag * rank > 1)
        assert len(queue) == 0
    assert max(on_device) <= 2
    assert len(gradients[True]) == 12
    assert all(torch.equal(a, b) for a, b in zip(gradients[False], gradients[True], strict=True))
