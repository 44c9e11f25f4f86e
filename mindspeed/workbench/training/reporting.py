"""Report a run: progress on the terminal, a log of steps, TensorBoard scalars, a picture of the loss."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mindspeed.engine.runtime import session
from mindspeed.files.step_log import LOG, open_log, read_log, row
from mindspeed.workbench.training.run_numbers import points
from mindspeed.workbench.training.run_page import PAGE, RESULT, report_page


class Reporter:
    """Reports one run; the first rank has one. ``tokens`` are those of a step."""

    def __init__(self, run: Path, first: int, last: int, tokens: int, interval: int) -> None:
        self.run, self.last, self.tokens, self.interval = run, last, tokens, interval
        self._first = first + 1
        self._log: TextIO = open_log(run, first)
        self._scalars: Any = None
        if find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._scalars = SummaryWriter(str(run / "tensorboard"))
        columns = TextColumn("loss {task.fields[loss]}  {task.fields[rate]} tokens/s"), TimeRemainingColumn()
        console = Console(stderr=True, markup=False, emoji=False, highlight=False, soft_wrap=True)
        self._bar = Progress(BarColumn(), MofNCompleteColumn(), *columns, console=console, disable=not sys.stderr.isatty())
        self._task = self._bar.add_task("train", total=last, completed=first, loss="-", rate="-")
        self._bar.start()
        self._since, self._at = first, time.perf_counter()
        self._losses: list[float] = []
        if self._scalars is None:
            self.note("tensorboard is not installed, so the run logs no scalars")

    def note(self, text: str) -> None:
        """A line that is kept on the terminal."""
        with suppress(OSError):  # of a terminal that has hung up
            self._bar.console.print(text)

    def step(
        self,
        step: int,
        loss: float,
        learning_rate: float,
        gradient: float | None,
        seconds: float,
        numbers: Mapping[str, float],
    ) -> None:
        """Record one step; show progress after the first step, every ``interval`` steps, and at the end.

        ``seconds`` are those of the slowest rank, ``numbers`` those of features.
        """
        self._losses.append(loss)
        own = {"loss": loss, "learning_rate": learning_rate, "gradient_norm": gradient, "seconds": seconds}
        self._row(step, {**own, **numbers})
        if step % self.interval and step != self.last:
            if step == self._first:
                self.note(f"step {step}/{self.last}  loss {loss:.4f}  took {seconds:.1f} s")
            return
        now = time.perf_counter()
        rate = (step - self._since) * self.tokens / (now - self._at)
        left = (self.last - step) * self.tokens / rate
        mean = sum(self._losses) / len(self._losses)
        self._since, self._at, self._losses = step, now, []
        self._log.flush()
        values = {"loss": mean, "learning_rate": learning_rate, "tokens_per_second": rate, "gradient_norm": gradient, **numbers}
        for name, value in values.items():
            self._scalar(f"train/{name}", value, step)
        self._bar.update(self._task, completed=step, loss=f"{mean:.4f}", rate=f"{rate:,.0f}")
        if self._bar.disable:
            shown = "".join(f"  {name} {value:.4g}" for name, value in numbers.items())
            self.note(f"step {step}/{self.last}  loss {mean:.4f}{shown}  {rate:,.0f} tokens/s  {_clock(left)} left")

    def rejected(self, step: int, loss: float, action: str, after: int) -> None:
        """Record a step that changed no weights, and the action. Training continues after step ``after``."""
        self._log.write(json.dumps({"step": step, "rejected_loss": str(loss), "action": action}) + "\n")
        self._log.flush()
        self._since, self._at, self._losses = after, time.perf_counter(), []
        self.note(f"step {step}/{self.last}  loss {loss:.4f} rejected: {action}")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time inside out of training time."""
        start = time.perf_counter()
        yield
        self._at += time.perf_counter() - start

    def held_out(self, step: int, loss: float) -> None:
        """Take down an evaluation."""
        self._row(step, {"heldout_loss": loss})
        self._scalar("heldout/loss", loss, step)
        self.note(f"step {step}/{self.last}  held-out loss {loss:.4f}")

    def close(self, result: Mapping[str, Any]) -> None:
        """Draw the loss and store the result of the run."""
        self._bar.stop()
        self._log.close()
        if self._scalars is not None:
            self._scalars.close()
        if find_spec("matplotlib") is not None:
            draw_losses(self.run)
        else:
            self.note("matplotlib is not installed, so the run draws no loss curve")
        (self.run / RESULT).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        (self.run / PAGE).write_text(report_page(self.run), encoding="utf-8")

    def _row(self, step: int, numbers: Mapping[str, float | None]) -> None:
        """Write a row to the log of the run, and hand it to features that log elsewhere."""
        self._log.write(row(step, numbers))
        metrics = {name: value for name, value in numbers.items() if value is not None}
        session.call("log_metrics", step=step, metrics=metrics)

    def _scalar(self, name: str, value: float | None, step: int) -> None:
        if self._scalars is not None and value is not None:
            self._scalars.add_scalar(name, value, step)


def draw_losses(run: Path) -> None:
    """Draw ``loss.png`` from the log of a run, the steps before a resume included."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_log(run / LOG)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per token)")
    for key, label, style in (("loss", "training", "-"), ("heldout_loss", "held out", "o")):
        found = points(rows, key)
        axes.plot([step for step, _ in found], [value for _, value in found], style, label=label)
    axes.legend()
    FigureCanvasAgg(figure).print_png(str(run / "loss.png"))


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
