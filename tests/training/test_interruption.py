"""Ctrl-C at the worst moment, while the ranks agree on whether anybody has been asked to stop; and a terminal that closes."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from mindspeed.training import launch
from mindspeed.training import trainer as module
from mindspeed.training.trainer import Trainer


def test_a_ctrl_c_while_ranks_agree_stops_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer.__new__(Trainer)
    optimizer = SimpleNamespace(zero_grad=lambda: None, param_groups=[{"lr": 0.1}], step=lambda: (False, 0.0, None))
    trainer.state = SimpleNamespace(chunks=[], optimizer=optimizer, step=0, samples=0)  # type: ignore[assignment]
    trainer.train_batches, trainer.samples_per_step = None, 1  # type: ignore[assignment]
    trainer.asked_to_stop, trainer.interrupted, trainer.initial_loss, trainer.reporter = False, False, 0.0, None
    arriving = [True, False]

    def largest(seconds: float, flag: bool) -> list[float]:
        if arriving.pop(0):
            trainer._interrupt(2, None)
        return [seconds, float(flag)]

    monkeypatch.setattr(module, "run_schedule", lambda *_: None)
    monkeypatch.setattr(module, "over_ranks", lambda loss: 1.0)
    monkeypatch.setattr(module, "largest", largest)
    monkeypatch.setattr(module.torch.cuda, "synchronize", lambda: None)
    trainer._step()
    assert not trainer.interrupted
    trainer._step()
    assert trainer.interrupted


def test_a_second_ctrl_c_stops_at_once() -> None:
    trainer = Trainer.__new__(Trainer)
    trainer.asked_to_stop = True
    with pytest.raises(KeyboardInterrupt):
        trainer._interrupt(2, None)


@pytest.fixture
def hangup(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[int]]]:
    """Run a trainer whose first step meets SIGHUP, and return the steps that it saved."""
    trainer = Trainer.__new__(Trainer)
    trainer.config, trainer.state = SimpleNamespace(train_iters=3), SimpleNamespace(step=0)  # type: ignore[assignment]
    trainer.saved, trainer.asked_to_stop, trainer.interrupted, trainer.reporter = 0, False, False, None
    saved: list[int] = []

    def step() -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        trainer.state.step += 1
        trainer.interrupted = trainer.asked_to_stop

    monkeypatch.setattr(trainer, "_step", step)
    monkeypatch.setattr(trainer, "_after_step", lambda: None)
    monkeypatch.setattr(trainer, "_save", lambda: saved.append(trainer.state.step))
    monkeypatch.setattr(trainer, "_result", dict)
    monkeypatch.setattr(module, "leave_terminal", lambda: None)
    before = signal.signal(signal.SIGHUP, lambda *_: None)

    def run() -> list[int]:
        trainer.run()
        return saved

    yield run
    signal.signal(signal.SIGHUP, before)


def test_a_terminal_that_closes_saves_and_ends(hangup: Callable[[], list[int]]) -> None:
    assert hangup() == [1]


def test_a_run_under_nohup_goes_on_when_its_terminal_closes(hangup: Callable[[], list[int]]) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert hangup() == [3]
    assert signal.SIGHUP not in launch.heeded([signal.SIGTERM, signal.SIGHUP])


def test_printing_to_a_terminal_that_has_hung_up_is_discarded() -> None:
    printed = "import os, pty; from mindspeed.training.launch import leave_terminal"
    code = f"{printed}; master, slave = pty.openpty(); os.dup2(slave, 1); os.close(master); leave_terminal(); os.write(1, b'x')"
    subprocess.run([sys.executable, "-c", code], check=True)
