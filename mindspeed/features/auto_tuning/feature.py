"""Measured against predicted seconds of a step, in the log of a run."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from mindspeed import plugins as ms


def add_to_store(prediction: Path, seconds: Sequence[float]) -> bool:
    """Write the median of ``seconds`` where the search that made ``prediction`` looks for it; return whether it was written.

    Rank 0 alone writes, and only with the number of processor cores and the torch that the search had. A file that cannot be
    read or written costs the measurement, not the run.
    """
    if os.environ.get("RANK", "0") != "0":
        return False
    from mindspeed.files.text_files import write_files

    with suppress(OSError, ValueError, KeyError, ms.MindSpeedError):
        known = json.loads(prediction.read_text(encoding="utf-8"))
        machine = known["machine"]
        if (machine["cores"], machine["torch"]) != (str(os.cpu_count()), version("torch").partition("+")[0]):
            return False
        file = Path(known["file"])
        found = {"key": known["key"], "seconds": statistics.median(seconds), "work": known["work"], "steps": len(seconds)}
        texts = {file.parents[1] / "machine": json.dumps(machine, indent=2), file: json.dumps(found)}
        write_files({path: f"{text}\n" for path, text in texts.items()}, is_private=True)
        return True
    return False


WARM_UP = 3
"""Steps of this process that are not measured."""
SAVED_EVERY = 10
"""Measured steps from one writing of their median to the next."""


class AutoTuningArgs(ms.FeatureArgs):
    predicted_seconds: float | None = ms.Field(
        None,
        gt=0,
        description="Predicted step time in seconds, which mindspeed tune writes into job.yaml. The run logs it next to the "
        "measured time",
    )
    prediction: str | None = ms.Field(
        None,
        description="Path of the prediction.json that mindspeed tune --output wrote. Measured step times are added to the "
        "measurements of mindspeed tune, and later searches use them for predictions",
    )
    mode: Literal["white", "mixed", "black"] | None = ms.Field(
        None,
        description="No effect; accepted for MindSpeed's scripts. To choose the search method, use mindspeed tune --mode: "
        "white predicts step times, mixed also measures the best configurations, black measures all",
    )
    folder: str | None = ms.Field(
        None,
        description="No effect; accepted for MindSpeed's scripts. To choose the output folder of a search, use mindspeed "
        "tune --output",
    )
    ranks: int | None = ms.Field(
        None,
        ge=1,
        description="No effect; accepted for MindSpeed's scripts. To choose the number of ranks of a search, use mindspeed "
        "tune --world-size",
    )


@ms.condition(
    "predicted_seconds is not set, so there is no prediction to compare with the measured step time",
    fix=(ms.Fix.run_command("mindspeed tune --world-size N --output FOLDER, then train with -f FOLDER/job.yaml"),),
)
def prediction_is_given(args: AutoTuningArgs, world: ms.World) -> bool:
    """Check that a step time was predicted."""
    return args.predicted_seconds is not None


@ms.condition(
    "file {args.prediction} does not exist, so measured step times are not stored for later searches",
    fix=(ms.Fix.drop_setting("prediction"), ms.Fix.advise("create the file by mindspeed tune --output FOLDER")),
    otherwise="warn",
)
def prediction_file_exists(args: AutoTuningArgs, world: ms.World) -> bool:
    """Check that the file of the prediction exists."""
    return args.prediction is None or Path(args.prediction).is_file()


class AutoTuning(ms.Feature[AutoTuningArgs]):
    """Report measured and predicted step times.

    The step times of a run are compared with the prediction that `mindspeed tune` made when it chose the layout.
    """

    spec = ms.FeatureSpec(
        name="auto-tuning",
        category=ms.Category.TOOL,
        level=0,
        constraints=(prediction_is_given, prediction_file_exists),
        provides={ms.Capability.PREDICTION_REPORT},
        numerics=ms.Numerics.exact(),
        verify_with=ms.VerifyWith(settings={"auto-tuning": {"predicted_seconds": 1.0}}),
    )
    steps = 0
    seconds: list[float]

    @ms.hookimpl
    def activated(self) -> None:
        self.steps, self.seconds = 0, []

    @ms.hookimpl
    @contextmanager
    def around_train_step(self, state: Any) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.steps += 1
        if self.steps > WARM_UP:
            self.seconds.append(time.perf_counter() - start)

    @ms.hookimpl
    def step_metrics(self, state: Any) -> Mapping[str, float] | None:
        if not self.seconds or self.args.predicted_seconds is None:
            return None
        if self.args.prediction is not None and len(self.seconds) % SAVED_EVERY == 0:
            from mindspeed.features.auto_tuning.feature import add_to_store

            add_to_store(Path(self.args.prediction), self.seconds)
        return {"measured": self.seconds[-1], "error": self.args.predicted_seconds / self.seconds[-1] - 1}
