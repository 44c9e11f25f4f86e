"""Every hook a feature may implement, grouped by the object whose life it follows. This file is the reference.

Each hook stands here with every fact about it: its parameters, when it runs, what its answer and None mean, and which
program calls it. Hooks run in plan order, per step or rarer, never inside a layer. A hook that no feature of the plan
implements is not wired: its hook point on Megatron (`mindspeed.megatron.hook_points`) is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeVar

import pluggy

if TYPE_CHECKING:
    from mindspeed.plugins.constraints import Cost
    from mindspeed.plugins.estimates import Estimate
    from mindspeed.plugins.patches import ArgOverride, Patch, Phase
    from mindspeed.plugins.process_variables import ProcessVariable
    from mindspeed.plugins.saved_tensors import SavedTensors

PROJECT: Final = "mindspeed"
hookimpl = pluggy.HookimplMarker(PROJECT)

Caller = Literal["plan", "planner", "session", "megatron-core", "training loop"]
"""The program that calls a hook."""

Answers = Literal["none", "each", "chained", "one", "merged"]
"""The way in which the answers of several features are combined."""


@dataclass(frozen=True, slots=True)
class HookFacts:
    """The facts of one hook.

    ``phase`` is the part of a run that has ended without a call when a feature had no effect there. ``answers`` says what
    becomes of the answers, ``none`` what the answer None means. ``value`` is the parameter with the object that the hook may
    change. ``proves`` is False for a hook whose calls are no evidence of an effect.
    """

    caller: Caller
    phase: Phase | None = None
    answers: Answers = "none"
    none: str = ""
    value: str = ""
    proves: bool = True


HOOKS: Final[dict[str, HookFacts]] = {}
"""The facts of every hook, by name."""

_Hook = TypeVar("_Hook", bound=Callable[..., Any])
_mark: Final = pluggy.HookspecMarker(PROJECT)


def hook(facts: HookFacts) -> Callable[[_Hook], _Hook]:
    """Mark a function as the specification of a hook with these facts."""

    def specify(function: _Hook) -> _Hook:
        HOOKS[function.__name__] = facts
        return _mark(function)

    return specify


class TrainState(Protocol):
    """The state of a training loop: model chunks, optimizer and scheduler of this rank, and the number of finished steps.

    ``scheduler`` is None in a loop with a constant learning rate.
    """

    chunks: list[Any]
    optimizer: Any
    scheduler: Any
    step: int


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit of a pipeline schedule: one micro-batch in one model chunk of this rank.

    ``microbatch`` is None where the schedule does not number its micro-batches.
    """

    microbatch: int | None
    chunk: int = 0


class PlanHooks:
    """Called while a plan is made; pure, without torch and megatron."""

    @hook(HookFacts("plan", answers="each", proves=False))
    def patches(self) -> list[Patch]:  # type: ignore[empty-body]
        """Return the patches of this feature, decided from ``self.args`` and ``self.world``."""

    @hook(HookFacts("plan", answers="each", proves=False))
    def megatron_args(self) -> list[ArgOverride]:  # type: ignore[empty-body]
        """Return the Megatron arguments that this feature sets."""

    @hook(HookFacts("plan", answers="each", proves=False))
    def notes(self) -> Iterable[str]:  # type: ignore[empty-body]
        """Return sentences about what the settings mean in this job; each is a note of the plan."""

    @hook(HookFacts("plan", answers="each", none="every slot of the declaration", proves=False))
    def held_slots(self) -> Collection[str] | None:
        """Return the slots, of those in ``FeatureSpec.slots``, that the feature holds with its settings."""

    @hook(HookFacts("plan", answers="merged", none="no values", proves=False))
    def job_values(self) -> Mapping[str, Any] | None:
        """Return fields of the job that the settings decide; those that the user gave stay as they are."""

    @hook(HookFacts("plan", answers="one", none="equal shares", proves=False))
    def layer_split(self) -> Sequence[int] | None:
        """Return the number of layers of each model chunk, in the order of the model (`World.layer_split`)."""

    @hook(HookFacts("plan", answers="merged", none="no variables", proves=False))
    def process_variables(self) -> Mapping[str, ProcessVariable] | None:
        """Return environment variables that the processes of a job must have from their start."""

    @hook(HookFacts("plan", answers="each", none="every step", proves=False))
    def working_steps(self) -> tuple[int, int] | None:
        """Return the first and the last step of a run in which the feature works."""


class PlannerHooks:
    """Called by the planner of memory and by the search of a layout; pure, without torch and megatron."""

    @hook(HookFacts("planner", answers="chained", none="the tensors as they were given", value="tensors", proves=False))
    def saved_tensors(self, tensors: SavedTensors) -> SavedTensors | None:
        """Return what layers keep for backward with this feature, from what they keep without it."""

    @hook(HookFacts("planner", answers="chained", none="the tensors as they were given", value="tensors", proves=False))
    def resting(self, tensors: SavedTensors) -> SavedTensors | None:
        """Return what the optimizer keeps between steps with this feature, from what it keeps without it."""

    @hook(HookFacts("planner", answers="each", none="nothing", proves=False))
    def estimate(self) -> Estimate | None:
        """Return what the feature adds to memory, work and traffic of the rank that has most.

        The sizes of ``self.world`` are arrays of many layouts, so formulas are plain arithmetic.
        """

    @hook(HookFacts("planner", answers="each", none="the search does not try it", proves=False))
    def variants(self) -> Sequence[Mapping[str, Any]] | None:
        """Return the settings with which a search tries the feature, in addition to leaving it out."""

    @hook(HookFacts("planner", answers="each", none="it cannot be chosen automatically", proves=False))
    def cost(self) -> Cost | None:
        """Return the cost of the feature, for a slot whose holder mindspeed may choose."""

    @hook(HookFacts("planner", answers="each", none="no limit", proves=False))
    def budget(self) -> tuple[str, float] | None:
        """Return the setting that limits the device memory of a rank, and its value in MiB.

        A plan whose ranks need more, by the planner of memory, is refused.
        """


class SessionHooks:
    """The life of a plan in one process."""

    @hook(HookFacts("session", proves=False))
    def activated(self) -> None:
        """Begin to work: the patches of the plan are in force in every module that is loaded."""

    @hook(HookFacts("session", proves=False))
    def deactivated(self) -> None:
        """Release everything that this feature holds outside its instance: the patches of the plan are undone."""


class ArgumentHooks:
    @hook(HookFacts("megatron-core", "build", value="config"))
    def config_ready(self, config: Any) -> None:
        """Inspect or change a TransformerConfig that has all overrides and that Megatron has accepted.

        Runs after the outermost ``__post_init__`` that Megatron defines for the class of the configuration.
        """


class ParallelHooks:
    @hook(HookFacts("megatron-core", "setup"))
    def groups_created(self, sizes: dict[str, int], get_group: Callable[[str], Any]) -> None:
        """Create process groups: those of model parallelism exist.

        ``sizes`` has tp, pp, cp, dp, ep; ``get_group("tp")`` returns the group of this rank.
        """

    @hook(HookFacts("megatron-core", "teardown"))
    def groups_destroyed(self) -> None:
        """Destroy every group of this feature: the groups of model parallelism are about to be destroyed."""

    @hook(HookFacts("megatron-core", "setup", "merged", "Megatron's own options", proves=False))
    def group_options(self, group: str) -> Any:
        """Return the options of the process group that Megatron is about to create under this name, or None.

        The answer is an options object of the backend, or a dictionary for a backend that takes one.
        """


class ModelHooks:
    @hook(HookFacts("megatron-core", "build", "chained", "the specification as it was given", value="spec"))
    def layer_spec(self, spec: Any, config: Any) -> Any:
        """Return the TransformerBlockSubmodules to build, changed or as given."""

    @hook(HookFacts("megatron-core", "build"))
    def model_built(self, chunks: Sequence[Any]) -> None:
        """Inspect or change the model: all model chunks of this rank exist, before the optimizer does."""


class PipelineHooks:
    @hook(HookFacts("megatron-core", "step", "one", "Megatron's schedule"))
    def schedule(self, config: Any) -> Callable[..., Any] | None:
        """Return the forward-backward function to use instead of Megatron's; only the holder of slot pipeline-schedule."""

    @hook(HookFacts("megatron-core", "step", "each", "nothing around this pass"))
    def around_schedule(
        self, chunks: Sequence[Any], forward_only: bool, micro_batches: int
    ) -> AbstractContextManager[None] | None:
        """Return a context manager around one pass of the schedule: forward of all micro-batches, and backward unless
        ``forward_only``."""

    @hook(HookFacts("megatron-core", "step", "each", "nothing around this unit"))
    def around_forward_step(self, unit: Unit) -> AbstractContextManager[None] | None:
        """Return a context manager around the forward pass of one unit, in Megatron's schedules without combined steps."""

    @hook(HookFacts("megatron-core", "step", "each", "nothing around this unit"))
    def around_backward_step(self, unit: Unit) -> AbstractContextManager[None] | None:
        """Return a context manager around the backward pass of one unit, in Megatron's schedules without combined steps."""


class TrainHooks:
    @hook(HookFacts("training loop", "step", "each", "nothing around this step"))
    def around_train_step(self, state: TrainState) -> AbstractContextManager[None] | None:
        """Return a context manager around one optimizer step, from zeroed gradients to updated weights."""

    @hook(HookFacts("megatron-core", "step"))
    def gradients_ready(self, chunks: Sequence[Any], gradients: Sequence[tuple[str, Any]]) -> None:
        """Inspect or change, in place, the gradients of a step, when Megatron has summed them over ranks and micro-batches.

        ``gradients`` has the name and the tensor of each trained parameter of the model ``chunks``. The tensor is its
        ``main_grad``, to which kernels may add outside of autograd, so that hooks of tensors see nothing; else its ``grad``.
        With the distributed optimizer, only the share of this rank is summed.
        """

    @hook(HookFacts("megatron-core", "build"))
    def optimizer_built(self, optimizer: Any) -> None:
        """Inspect or change the optimizer that Megatron has built."""

    @hook(HookFacts("training loop", "step", "each", "no numbers", proves=False))
    def step_metrics(self, state: TrainState) -> Mapping[str, float] | None:
        """Return numbers of the step that has ended, for the log of the loop.

        A name without a dot becomes ``feature.name``; one with a dot stands as it is, and in ``log.jsonl`` dots nest.
        `mindspeed pretrain` logs those of rank 0, Megatron-LM those of the last pipeline stage, as means that are above zero.
        """


class CheckpointHooks:
    @hook(HookFacts("training loop", "checkpoint", "each"))
    def save_extra(self, state: TrainState) -> dict[str, Any]:  # type: ignore[empty-body]
        """Return what this feature adds to a checkpoint, which stores it under the name of the feature."""

    @hook(HookFacts("training loop", "checkpoint", proves=False))
    def load_extra(self, state: TrainState, data: dict[str, Any]) -> None:
        """Take back what `save_extra` returned."""


HOOK_CLASSES: Final = (
    PlanHooks,
    PlannerHooks,
    SessionHooks,
    ArgumentHooks,
    ParallelHooks,
    ModelHooks,
    PipelineHooks,
    TrainHooks,
    CheckpointHooks,
)
