"""Ctrl-C at the worst moment: while the ranks agree on whether anybody has been asked to stop."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mindspeed.training import trainer as module
from mindspeed.training.trainer import Trainer


def test_a_ctrl_c_while_ranks_agree_stops_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer.__new__(Trainer)
    optimizer = SimpleNamespace(zero_grad=lambda: None, param_groups=[{"lr": 0.1}], step=lambda: (False, 0.0, None))
    trainer.state = SimpleNamespace(chunks=[], optimizer=optimizer, step=0, samples=0)  # type: ignore[assignment]
    trainer.train_batches, trainer.samples_per_step = None, 1  # type: ignore[assignment]
    trainer.asked_to_stop, trainer.interrupted, trainer.initial_loss, trainer.reporter = False, False, 0.0, None
    arriving = [True, False]

    def over_ranks(loss: None, flag: bool) -> tuple[float, bool]:
        if arriving.pop(0):
            trainer._interrupt(2, None)
        return 1.0, flag

    monkeypatch.setattr(module, "run_schedule", lambda *_: None)
    monkeypatch.setattr(module, "over_ranks", over_ranks)
    trainer._step()
    assert not trainer.interrupted
    trainer._step()
    assert trainer.interrupted


def test_a_second_ctrl_c_stops_at_once() -> None:
    trainer = Trainer.__new__(Trainer)
    trainer.asked_to_stop = True
    with pytest.raises(KeyboardInterrupt):
        trainer._interrupt(2, None)
