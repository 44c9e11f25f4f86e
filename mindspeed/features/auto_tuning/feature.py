"""Measured against predicted seconds of a step, in the log of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from mindspeed.plugins import Category, Check, Feature, FeatureArgs, FeatureSpec, Field, Numerics, VerifyWith, hookimpl

WARM_UP = 3
"""Steps of this process that are not measured."""


class AutoTuningArgs(FeatureArgs):
    predicted_seconds: float | None = Field(None, gt=0, description="seconds of a step that mindspeed tune predicted")
    mode: Literal["white", "mixed", "black"] | None = Field(None, description="old setting; a mode of mindspeed tune")
    folder: str | None = Field(None, description="old setting; --output of mindspeed tune")
    ranks: int | None = Field(None, ge=1, description="old setting; --world-size of mindspeed tune")


def _has_prediction(args: AutoTuningArgs, world: object) -> bool:
    return args.predicted_seconds is not None


class AutoTuning(Feature[AutoTuningArgs]):
    """Log the seconds of a step beside those that were predicted; the search itself is a command of its own."""

    spec = FeatureSpec(
        name="auto-tuning",
        summary="Measured against predicted step time of a layout found by mindspeed tune",
        category=Category.TOOL,
        level=0,
        constraints=(
            Check(
                _has_prediction,
                "a training run does not search for its layout",
                fix="mindspeed tune --world-size N --output FOLDER, then train with -f FOLDER/job.yaml",
            ),
        ),
        numerics=Numerics.exact(),
        verify_with=VerifyWith(settings={"auto-tuning": {"predicted_seconds": 1.0}}),
    )
    seconds: float | None = None
    steps = 0

    @hookimpl
    @contextmanager
    def around_train_step(self, state: Any) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.steps += 1
        self.seconds = time.perf_counter() - start if self.steps > WARM_UP else None

    @hookimpl
    def step_metrics(self, state: Any) -> Mapping[str, float] | None:
        if self.seconds is None or self.args.predicted_seconds is None:
            return None
        return {"measured": self.seconds, "error": self.args.predicted_seconds / self.seconds - 1}
