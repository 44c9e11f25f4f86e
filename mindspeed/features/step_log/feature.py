"""Memory and communication of each step, and the log that Megatron-LM does not write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mindspeed import plugins as ms
from mindspeed.files.step_log import row
from mindspeed.memory.patches import counted_collectives

if TYPE_CHECKING:
    from mindspeed.memory.step_costs import StepCosts

_COUNTED: Final = "counts the bytes of collectives, which the cpu platform counts by itself"


class StepLogArgs(ms.FeatureArgs):
    file: str = ms.Field(
        "",
        description="File to which each step adds a line of JSON with its loss, time and metrics. mindspeed pretrain writes "
        "log.jsonl without it",
    )


class StepLog(ms.Feature[StepLogArgs]):
    """Log peak memory and communication of each step.

    Both are those of the rank that has most. With ``file``, a run of Megatron-LM writes the log that ``mindspeed pretrain``
    writes, and ``mindspeed compare`` reads it.
    """

    spec = ms.FeatureSpec(
        name="step-log",
        category=ms.Category.TOOL,
        level=0,
        provides={ms.Capability.STEP_COSTS},
        numerics=ms.Numerics.exact(),
    )
    costs: StepCosts | None = None

    @ms.hookimpl
    def patches(self) -> list[ms.Patch]:
        is_device = self.world.knows("platform") and self.world.platform != "cpu"
        return counted_collectives(_COUNTED) if is_device else []

    @ms.hookimpl
    def model_built(self, chunks: Sequence[Any]) -> None:
        from mindspeed.memory.step_costs import StepCosts

        self.costs = StepCosts(chunks)

    @ms.hookimpl
    def optimizer_built(self, optimizer: Any) -> None:
        if self.costs is not None:
            self.costs.memory.optimizer = optimizer

    @ms.hookimpl
    def around_schedule(self, chunks: Sequence[Any], forward_only: bool) -> AbstractContextManager[None] | None:
        return None if self.costs is None or forward_only else self.costs.passes()

    @ms.hookimpl
    def around_train_step(self, state: Any) -> AbstractContextManager[None] | None:
        return None if self.costs is None else self.costs.step()

    @ms.hookimpl
    def step_metrics(self, state: Any) -> Mapping[str, float] | None:
        return None if self.costs is None else self.costs.metrics

    @ms.hookimpl
    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.args.file:
            with Path(self.args.file).open("a", encoding="utf-8") as file:
                file.write(row(step, metrics))
