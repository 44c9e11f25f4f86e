"""The policy for losses that are not finite and for loss spikes."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed.workbench.training import loss_guard
from mindspeed.workbench.training.config import TrainConfig
from mindspeed.workbench.training.loss_guard import LossGuard


def chunk(*gradients: float) -> Any:
    return SimpleNamespace(buffers=[SimpleNamespace(grad_data=torch.tensor(gradients))], expert_parallel_buffers=[])


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_guard, "over_ranks", lambda loss: float(loss))
    monkeypatch.setattr(loss_guard, "largest", lambda *values: list(values))


def actions(guard: LossGuard, *losses: float, gradient: float = 1.0) -> list[str | None]:
    return [guard.judge(step, torch.tensor(loss), [chunk(gradient)]) for step, loss in enumerate(losses, 1)]


def test_the_policy_decides_what_becomes_of_a_step() -> None:
    guard = LossGuard(TrainConfig(on_nan="skip"), scales_loss=False)
    assert actions(guard, 2.0, math.nan, math.inf, 2.0, 100.0) == [None, "skip", "skip", None, None]
    assert not LossGuard(TrainConfig(), scales_loss=False).is_active


def test_an_infinite_gradient_is_rejected_unless_the_loss_is_scaled() -> None:
    for scaled, action in ((False, "rollback"), (True, None)):
        guard = LossGuard(TrainConfig(on_nan="rollback"), scales_loss=scaled)
        assert actions(guard, 2.0, gradient=math.inf) == [action]


def test_a_spike_exceeds_the_mean_of_the_usable_losses_before_it() -> None:
    guard = LossGuard(TrainConfig(on_spike="rollback"), scales_loss=False)
    assert actions(guard, *[2.0] * 10, 3.9, 4.5, 2.0) == [*[None] * 11, "rollback", None]
    assert actions(LossGuard(TrainConfig(on_spike="skip"), scales_loss=False), *[2.0] * 9, 50.0)[-1] is None


def test_rejected_steps_count_until_a_usable_one_lies_beyond_them() -> None:
    guard = LossGuard(TrainConfig(on_nan="rollback"), scales_loss=False)
    nan, usable = torch.tensor(math.nan), torch.tensor(2.0)
    for step, loss, rejected in ((7, nan, 1), (5, usable, 1), (7, nan, 2), (6, usable, 2), (7, usable, 2), (8, usable, 0)):
        guard.judge(step, loss, [chunk(1.0)])
        assert guard.rejected == rejected
