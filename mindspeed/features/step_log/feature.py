"""Memory and communication of each step, the record of one step, and the log that Megatron-LM does not write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TextIO

from mindspeed import plugins as ms
from mindspeed.files.step_log import open_log, row
from mindspeed.memory.patches import counted_collectives
from mindspeed.process.run import run_folder, unlogged_folder

if TYPE_CHECKING:
    from mindspeed.files.step_record import StepRecord
    from mindspeed.memory.step_costs import StepCosts
    from mindspeed.pipeline.step_recorder import StepRecorder

_COUNTED: Final = "counts the bytes of collectives, which the cpu platform counts by itself"


class StepLogArgs(ms.FeatureArgs):
    recorded_step: int = ms.Field(
        3,
        ge=0,
        description="Step, counted from 1 at the start of the process, whose passes, sections and memory are recorded for "
        "`mindspeed report` (0 = none). A run that is shorter records its last step",
    )


class StepLog(ms.Feature[StepLogArgs]):
    """Log peak memory and communication of each step.

    Both are those of the rank that has most. The times of the passes and sections of one step are recorded as well. A run of
    Megatron-LM writes the log that ``mindspeed pretrain`` writes. ``mindspeed report`` and ``mindspeed compare`` read all of
    it.
    """

    spec = ms.FeatureSpec(
        name="step-log",
        category=ms.Category.TOOL,
        level=0,
        provides={ms.Capability.STEP_COSTS},
        numerics=ms.Numerics.exact(),
    )
    costs: StepCosts | None = None
    log: TextIO | None = None
    recorder: StepRecorder | None = None
    """Of the step that is running, where it is recorded."""
    recorded: StepRecord | None = None
    sizes: Mapping[str, int] | None = None
    steps: int = 0

    @ms.hookimpl
    def patches(self) -> list[ms.Patch]:
        is_device = self.world.knows("platform") and self.world.platform != "cpu"
        return counted_collectives(_COUNTED) if is_device else []

    @ms.hookimpl
    def model_built(self, chunks: Sequence[Any]) -> None:
        from megatron.core.models.gpt import GPTModel

        from mindspeed.memory.step_costs import StepCosts

        self.costs = StepCosts(chunks)
        modules = (module for chunk in chunks for module in chunk.modules())
        model = next((module for module in modules if isinstance(module, GPTModel)), None)
        self.sizes = {} if model is None else {"vocab_size": model.vocab_size}

    @ms.hookimpl
    def optimizer_built(self, optimizer: Any) -> None:
        if self.costs is not None:
            self.costs.memory.optimizer = optimizer

    @ms.hookimpl
    def around_schedule(self, chunks: Sequence[Any], forward_only: bool) -> AbstractContextManager[None] | None:
        if self.costs is None or forward_only:
            return None
        return self._passes(self.costs)

    @ms.hookimpl
    def around_forward_step(self, unit: Any) -> AbstractContextManager[None] | None:
        return self._pass("F", unit)

    @ms.hookimpl
    def around_backward_step(self, unit: Any) -> AbstractContextManager[None] | None:
        return self._pass("D", unit)

    @ms.hookimpl
    def around_data_load(self) -> AbstractContextManager[None] | None:
        return None if self.recorder is None else self.recorder.span("L")

    @ms.hookimpl
    def around_train_step(self, state: Any) -> AbstractContextManager[None] | None:
        return None if self.costs is None else self._step(self.costs, state.step + 1)

    @ms.hookimpl
    def step_metrics(self, state: Any) -> Mapping[str, float] | None:
        return None if self.costs is None else self.costs.metrics

    @ms.hookimpl
    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        if (folder := unlogged_folder()) is None:
            return
        if self.log is None:
            folder.mkdir(parents=True, exist_ok=True)
            self.log = open_log(folder, step - 1)
        self.log.write(row(step, metrics))
        self.log.flush()

    @ms.hookimpl
    def deactivated(self) -> None:
        if self.log is not None:
            self.log.close()

    @contextmanager
    def _passes(self, costs: StepCosts) -> Iterator[None]:
        with costs.passes(), nullcontext() if self.recorder is None else self.recorder.passes():
            yield

    @contextmanager
    def _step(self, costs: StepCosts, step: int) -> Iterator[None]:
        self.steps += 1
        if self.steps <= self.args.recorded_step:
            from mindspeed.pipeline.step_recorder import StepRecorder

            self.recorder = StepRecorder(costs.memory.lap)
        with costs.step(), nullcontext() if self.recorder is None else self.recorder.step():
            yield
        if self.recorder is not None:
            self._write(self.recorder, step)
            self.recorder = None

    def _write(self, recorder: StepRecorder, step: int) -> None:
        """Write the record of the step, on the first rank of its pipeline stage."""
        from mindspeed.pipeline.step_recorder import stage_of_rank

        if (stage := stage_of_rank()) is None or (folder := run_folder()) is None:
            return
        record = replace(recorder.record(step, *stage), sizes=self.sizes or {})
        if self.recorded is not None and not record.memory:
            record = replace(record, memory=self.recorded.memory, memory_step=self.recorded.memory_step)
        self.recorded = record
        record.write(folder)

    def _pass(self, kind: str, unit: Any) -> AbstractContextManager[None] | None:
        if self.recorder is None or not self.recorder.in_passes:
            return None
        return self.recorder.span(kind, unit.chunk, unit.microbatch or 0)
