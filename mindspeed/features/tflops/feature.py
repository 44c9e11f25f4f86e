"""Floating-point operations of a step: those of the model, those that run, and those that run twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from mindspeed import plugins as ms
from mindspeed.plugins.shared_conditions import NO_CUDA_GRAPHS, NO_TRANSFORMER_ENGINE_LAYERS

if TYPE_CHECKING:
    from mindspeed.features.tflops.meter import StepMeter


class TflopsArgs(ms.FeatureArgs):
    interval: int = ms.Field(
        100,
        ge=1,
        description="Number of steps after which the operations of a step are counted again; the first step is always counted",
    )
    peak: float | None = ms.Field(
        None,
        gt=0,
        description="Peak TFLOP/s of one device for dense matrix products in the job's data type. If set, utilization (mfu "
        "and hfu) is logged as a fraction of it",
    )


class Tflops(ms.Feature[TflopsArgs]):
    """Log model and hardware FLOP/s of every step.

    Matrix products are counted in the first step, and again after every ``interval`` steps. The steps in between use the
    last count.
    """

    spec = ms.FeatureSpec(
        name="tflops",
        category=ms.Category.TOOL,
        level=0,
        constraints=(NO_CUDA_GRAPHS, NO_TRANSFORMER_ENGINE_LAYERS),  # their products pass torch's dispatcher by
        numerics=ms.Numerics.exact(),
    )
    meter: StepMeter | None = None

    @ms.hookimpl
    def model_built(self, chunks: Sequence[Any]) -> None:
        from mindspeed.features.tflops.layers import model_operations
        from mindspeed.features.tflops.meter import StepMeter

        self.meter = StepMeter(self.args.interval, model_operations(chunks, self.world), self.args.peak)

    @ms.hookimpl
    def around_train_step(self, state: Any) -> AbstractContextManager[None] | None:
        return None if self.meter is None else self.meter.step(state.step)

    @ms.hookimpl
    def step_metrics(self, state: Any) -> Mapping[str, float] | None:
        return None if self.meter is None else self.meter.metrics()
