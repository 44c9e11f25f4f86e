"""Checkpoints that are restored early, and the queue of weight gradients."""

import pytest
import torch
from torch import Tensor, UntypedStorage, nn

from mindspeed.memory.checkpoint import Checkpoint
from mindspeed.pipeline.weight_gradients import QueuedTensor, WeightGradients


def gradients(model: nn.Module, given: Tensor, early: bool | None) -> list[Tensor]:
    torch.manual_seed(1)
    leaf = given.clone().requires_grad_()
    if early is None:
        output = model(leaf)
    else:
        checkpoint = Checkpoint(model, (leaf,))
        output = checkpoint.run()
        if early:
            torch.manual_seed(7)
            before = torch.get_rng_state()
            checkpoint.restore()
            assert torch.equal(before, torch.get_rng_state())
    model.zero_grad()
    output.square().sum().backward()
    if early is not None:
        assert checkpoint.restored == 1
    assert leaf.grad is not None
    return [leaf.grad, *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize("early", [False, True])
def test_a_checkpoint_gives_the_gradients_of_the_call_with_dropout(early: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    given = torch.randn(3, 8)
    expected, actual = gradients(model, given, None), gradients(model, given, early)
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))


class Counted:
    """Product that gives a fixed gradient and records when it is prepared and run."""

    def __init__(self, weight: Tensor, value: float, log: list[str]) -> None:
        self.weight, self.value, self.log = weight, value, log
        self.prepared = False

    def storages(self) -> list[UntypedStorage]:
        return []

    def prepare(self) -> None:
        if not self.prepared:
            self.log.append(f"prepare {self.value:g}")
        self.prepared = True

    def add(self, before: Tensor | None) -> Tensor | None:
        self.log.append(f"add {self.value:g}")
        gradient = torch.full_like(self.weight, self.value)
        return gradient if before is None else before + gradient


def test_a_weight_that_is_used_twice_is_finished_once_with_the_sum() -> None:
    finished: list[tuple[int, float | None]] = []
    queue = WeightGradients(lambda chunk, weight, total: finished.append((chunk, None if total is None else float(total))))
    shared, alone, log = torch.zeros(1), torch.zeros(1), []
    for weight, value in ((shared, 1.0), (alone, 2.0), (shared, 4.0)):
        queue.push((1, 0), Counted(weight, value, log))
    queue.run((1, 0))
    assert finished == [(1, 2.0), (1, 5.0)]
    assert log == ["prepare 1", "prepare 2", "add 1", "prepare 4", "add 2", "add 4"]
    assert len(queue) == 0


def test_a_product_runs_behind_a_collective_only_while_its_unit_is_due() -> None:
    queue = WeightGradients(lambda chunk, weight, total: None)
    log: list[str] = []
    queue.push((0, 0), Counted(torch.zeros(1), 1.0, log))
    queue.run_behind()
    assert log == []
    queue.due = (0, 0)
    queue.run_behind()
    assert log == ["prepare 1", "add 1"]


def test_a_tensor_that_is_changed_while_it_waits_is_refused() -> None:
    tensor = torch.zeros(2)
    kept = QueuedTensor(tensor)
    assert kept.take() is tensor
    tensor.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        kept.take()
