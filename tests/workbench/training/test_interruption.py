"""Signals at the worst moments: while ranks agree, during a save, during an evaluation; and a terminal that closes."""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from mindspeed.engine.runtime import launch
from mindspeed.workbench.training import evaluation, interruption
from mindspeed.workbench.training import trainer as module
from mindspeed.workbench.training.checkpoints import checkpoint_path
from mindspeed.workbench.training.interruption import SAVING_SIGNALS, StopRequest, children_without, ended_unsaved
from mindspeed.workbench.training.trainer import Trainer


def test_a_ctrl_c_while_ranks_agree_stops_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer.__new__(Trainer)
    optimizer = SimpleNamespace(zero_grad=lambda: None, param_groups=[{"lr": 0.1}], step=lambda: (False, 0.0, None))
    trainer.state = SimpleNamespace(chunks=[], optimizer=optimizer, step=0, samples=0)  # type: ignore[assignment]
    trainer.train_batches, trainer.samples_per_step = None, 1  # type: ignore[assignment]
    trainer.stop, trainer.interrupted, trainer.initial_loss, trainer.reporter = StopRequest(), False, 0.0, None
    trainer.guard = SimpleNamespace(is_active=False, rejected=0)  # type: ignore[assignment]
    arriving = [True, False]

    def largest(seconds: float, flag: bool) -> list[float]:
        if arriving.pop(0):
            trainer.stop.handle(2, None)
        return [seconds, float(flag)]

    monkeypatch.setattr(module, "run_schedule", lambda *_: None)
    monkeypatch.setattr(module, "over_ranks", lambda loss: 1.0)
    monkeypatch.setattr(module, "largest", largest)
    monkeypatch.setattr(module.torch.cuda, "synchronize", lambda: None)
    trainer._step()
    assert not trainer.interrupted
    trainer._step()
    assert trainer.interrupted


def test_a_second_ctrl_c_stops_at_once_and_another_second_signal_does_not() -> None:
    stop = StopRequest()
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        stop.handle(number, None)
    assert stop.is_made
    with pytest.raises(KeyboardInterrupt):
        stop.handle(signal.SIGINT, None)


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    """A trainer of one rank and three steps, which saves and evaluates after each and whose steps take no time."""
    trainer = Trainer.__new__(Trainer)
    trainer.config = SimpleNamespace(train_iters=3, save_interval=1, eval_interval=1, eval_iters=4)  # type: ignore[assignment]
    trainer.state = SimpleNamespace(step=0, chunks=[])  # type: ignore[assignment]
    trainer.job, trainer.source, trainer.held_out_batches = None, SimpleNamespace(identity=""), None  # type: ignore[assignment]
    trainer.saver = SimpleNamespace(save=lambda *_: None, finish=lambda *_: False, is_writing=False)  # type: ignore[assignment]
    trainer.saved, trainer.stop, trainer.interrupted, trainer.reporter = 0, StopRequest(), False, None

    def step() -> None:
        trainer.state.step += 1
        trainer._agree_to_stop()

    monkeypatch.setattr(module, "largest", lambda *values: list(map(float, values)))
    monkeypatch.setattr(trainer, "_step", step)
    monkeypatch.setattr(trainer, "_result", dict)
    return trainer


def test_a_signal_during_a_save_ends_the_run_after_that_save(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []

    def save(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        saved.append(trainer.state.step)

    monkeypatch.setattr(trainer.saver, "save", save)
    monkeypatch.setattr(module, "held_out_loss", lambda *_: pytest.fail("evaluated after the signal"))
    trainer.run()
    assert (saved, trainer.state.step) == ([1], 1)


def test_a_signal_during_an_evaluation_ends_it_before_the_next_batch(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []

    def run_schedule(*_: object, **__: object) -> None:
        batches.append(trainer.state.step)
        os.kill(os.getpid(), signal.SIGTERM)

    dataset = SimpleNamespace(count=1, micro_batch_size=1, replicas=1, dataset=range(9))
    trainer.held_out_batches = dataset  # type: ignore[assignment]
    monkeypatch.setattr(evaluation, "run_schedule", run_schedule)
    monkeypatch.setattr(evaluation, "over_ranks", lambda loss: 1.0)
    trainer.run()
    assert (batches, trainer.state.step) == ([1], 1)


def test_a_process_that_a_save_starts_never_gets_the_signals_of_its_group_and_the_rank_does() -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: got.append(number))
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with children_without(SAVING_SIGNALS):
        helper = multiprocessing.get_context("spawn").Manager()
        for number in SAVING_SIGNALS:
            os.kill(helper._process.pid, number)  # type: ignore[attr-defined]
        os.kill(os.getpid(), signal.SIGUSR1)
    assert helper.Queue().empty(), "the helper still answers"
    assert got == [signal.SIGUSR1]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == blocked
    signal.signal(signal.SIGUSR1, before)
    helper.shutdown()


def test_a_job_that_a_signal_ends_before_it_saves_says_what_is_left(tmp_path: Path) -> None:
    assert str(ended_unsaved(str(tmp_path), signal.SIGTERM)) == (
        "MS604 SIGTERM ended the job before its first step; nothing was saved, and no checkpoint exists\n"
        f"  where: {tmp_path}\n"
        "  fix: start the job again"
    )
    checkpoint_path(tmp_path, 7).mkdir(parents=True)
    assert str(ended_unsaved(str(tmp_path), signal.SIGUSR1)) == (
        "MS604 SIGUSR1 ended the job before its first step; nothing was saved, and the checkpoint of step 7 is "
        "unchanged\n"
        f"  where: {tmp_path}\n"
        f"  fix: mindspeed pretrain --resume {tmp_path}"
    )


@pytest.fixture
def hangup(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[int]]]:
    """Run a trainer whose first step meets SIGHUP, and return the steps that it saved."""
    trainer = Trainer.__new__(Trainer)
    trainer.config, trainer.state = SimpleNamespace(train_iters=3), SimpleNamespace(step=0)  # type: ignore[assignment]
    trainer.saver = SimpleNamespace(save=lambda *_: None, finish=lambda *_: False, is_writing=False)  # type: ignore[assignment]
    trainer.saved, trainer.stop, trainer.interrupted, trainer.reporter = 0, StopRequest(), False, None
    saved: list[int] = []

    def step() -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        trainer.state.step += 1
        trainer.interrupted = trainer.stop.is_made

    monkeypatch.setattr(trainer, "_step", step)
    monkeypatch.setattr(trainer, "_after_step", lambda: None)
    monkeypatch.setattr(trainer, "_save", lambda: saved.append(trainer.state.step))
    monkeypatch.setattr(trainer, "_result", dict)
    monkeypatch.setattr(interruption, "leave_terminal", lambda: None)
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
    printed = "import os, pty; from mindspeed.engine.runtime.launch import leave_terminal"
    code = f"{printed}; master, slave = pty.openpty(); os.dup2(slave, 1); os.close(master); leave_terminal(); os.write(1, b'x')"
    subprocess.run([sys.executable, "-c", code], check=True)
