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
        """Return sentences that explain the effect of the settings in this job. The plan shows each as a note."""

    @hook(HookFacts("plan", answers="each", none="every slot of the declaration", proves=False))
    def held_slots(self) -> Collection[str] | None:
        """Return which of the slots in ``FeatureSpec.slots`` the feature holds with its settings."""

    @hook(HookFacts("plan", answers="merged", none="no values", proves=False))
    def job_values(self) -> Mapping[str, Any] | None:
        """Return job fields that follow from the settings. Values given by the user are not changed."""

    @hook(HookFacts("plan", answers="one", none="equal shares", proves=False))
    def layer_split(self) -> Sequence[int] | None:
        """Return the number of layers of each model chunk, in the order of the model (`World.layer_split`)."""

    @hook(HookFacts("plan", answers="merged", none="no variables", proves=False))
    def process_variables(self) -> Mapping[str, ProcessVariable] | None:
        """Return environment variables that must be set before the processes of a job start."""

    @hook(HookFacts("plan", answers="each", none="every step", proves=False))
    def working_steps(self) -> tuple[int, int] | None:
        """Return the first and the last step of a run in which the feature works."""


class PlannerHooks:
    """Called by the planner of memory and by the search of a layout; pure, without torch and megatron."""

    @hook(HookFacts("planner", answers="chained", none="the tensors, unchanged", value="tensors", proves=False))
    def saved_tensors(self, tensors: SavedTensors) -> SavedTensors | None:
        """Return the tensors that layers save for backward with this feature, given those without it."""

    @hook(HookFacts("planner", answers="chained", none="the tensors, unchanged", value="tensors", proves=False))
    def resting(self, tensors: SavedTensors) -> SavedTensors | None:
        """Return the tensors that the optimizer keeps between steps with this feature, given those without it."""

    @hook(HookFacts("planner", answers="each", none="nothing", proves=False))
    def estimate(self) -> Estimate | None:
        """Return the memory, work and traffic that the feature adds on the rank with the highest load.

        The sizes of ``self.world`` are arrays of many layouts, so write formulas as plain arithmetic.
        """

    @hook(HookFacts("planner", answers="each", none="the search skips this configuration", proves=False))
    def variants(self) -> Sequence[Mapping[str, Any]] | None:
        """Return the settings with which a search tries the feature, in addition to running without it."""

    @hook(HookFacts("planner", answers="each", none="the feature cannot be chosen automatically", proves=False))
    def cost(self) -> Cost | None:
        """Return the cost of the feature, so that mindspeed can choose among features for one slot."""

    @hook(HookFacts("planner", answers="each", none="no limit", proves=False))
    def budget(self) -> tuple[str, float] | None:
        """Return the setting that limits the device memory of a rank, and its value in MiB.

        A plan is refused if the memory estimate of a rank exceeds this value.
        """


class SessionHooks:
    """The life of a plan in one process."""

    @hook(HookFacts("session", proves=False))
    def activated(self) -> None:
        """Start working. The patches of the plan are now applied to every loaded module."""

    @hook(HookFacts("session", proves=False))
    def deactivated(self) -> None:
        """Release all resources that this feature holds outside its instance. The patches of the plan are now undone."""


class ArgumentHooks:
    @hook(HookFacts("megatron-core", "build", value="config"))
    def config_ready(self, config: Any) -> None:
        """Inspect or change a TransformerConfig, after argument overrides were applied and Megatron has validated it.

        Runs after the outermost ``__post_init__`` that Megatron defines for the class of the configuration.
        """


class ParallelHooks:
    @hook(HookFacts("megatron-core", "setup"))
    def groups_created(self, sizes: dict[str, int], get_group: Callable[[str], Any]) -> None:
        """Create the process groups of this feature. Megatron's model-parallel groups exist already.

        ``sizes`` maps tp, pp, cp, dp and ep to their sizes. ``get_group("tp")`` returns Megatron's group with this rank.
        """

    @hook(HookFacts("megatron-core", "teardown"))
    def groups_destroyed(self) -> None:
        """Destroy all process groups of this feature. Megatron destroys its model-parallel groups afterwards."""

    @hook(HookFacts("megatron-core", "setup", "merged", "Megatron's default options", proves=False))
    def group_options(self, group: str) -> Any:
        """Return the options of the process group that Megatron is about to create under this name, or None.

        The return value is an options object of the backend, or a dictionary for backends that accept one.
        """


class ModelHooks:
    @hook(HookFacts("megatron-core", "build", "chained", "the specification, unchanged", value="spec"))
    def layer_spec(self, spec: Any, config: Any) -> Any:
        """Return the TransformerBlockSubmodules to build, changed or unchanged."""

    @hook(HookFacts("megatron-core", "build"))
    def model_built(self, chunks: Sequence[Any]) -> None:
        """Inspect or change the model. All model chunks of this rank exist, but the optimizer does not yet."""


class PipelineHooks:
    @hook(HookFacts("megatron-core", "step", "one", "Megatron's schedule"))
    def schedule(self, config: Any) -> Callable[..., Any] | None:
        """Return the forward-backward function to use instead of Megatron's. Called only for the feature in the slot
        pipeline-schedule."""

    @hook(HookFacts("megatron-core", "step", "each", "nothing around this pass"))
    def around_schedule(
        self, chunks: Sequence[Any], forward_only: bool, micro_batches: int
    ) -> AbstractContextManager[None] | None:
        """Return a context manager around one pass of the schedule: forward of all micro-batches, and backward unless
        ``forward_only``."""

    @hook(HookFacts("megatron-core", "step", "each", "nothing around this unit"))
    def around_forward_step(self, unit: Unit) -> AbstractContextManager[None] | None:
        """Return a context manager around the forward pass of one micro-batch in one model chunk. Not called in Megatron's
        schedules with combined forward-backward steps."""

    @hook(HookFacts("megatron-core", "step", "each", "nothing around this unit"))
    def around_backward_step(self, unit: Unit) -> AbstractContextManager[None] | None:
        """Return a context manager around the backward pass of one micro-batch in one model chunk. Not called in Megatron's
        schedules with combined forward-backward steps."""


class TrainHooks:
    @hook(HookFacts("training loop", "step", "each", "nothing around this step"))
    def around_train_step(self, state: TrainState) -> AbstractContextManager[None] | None:
        """Return a context manager around one optimizer step, from zeroed gradients to updated weights."""

    @hook(HookFacts("megatron-core", "step"))
    def gradients_ready(self, chunks: Sequence[Any], gradients: Sequence[tuple[str, Any]]) -> None:
        """Inspect the gradients of a step or change them in place, after Megatron has summed them over ranks and
        micro-batches.

        ``gradients`` contains the name and the gradient of each trained parameter of the model ``chunks``. The gradient is
        ``main_grad`` if the parameter has one, else ``grad``. With the distributed optimizer, only the
        shard of this rank contains the sum.
        """

    @hook(HookFacts("megatron-core", "build"))
    def optimizer_built(self, optimizer: Any) -> None:
        """Inspect or change the optimizer that Megatron has built."""

    @hook(HookFacts("training loop", "step", "each", "no numbers", proves=False))
    def step_metrics(self, state: TrainState) -> Mapping[str, float] | None:
        """Return metrics of the finished step for the training log.

        A name without a dot becomes ``feature.name``; a name with a dot is used unchanged. In ``log.jsonl`` dots create
        nested objects. `mindspeed pretrain` logs the values of rank 0. Megatron-LM logs means over its log interval, of
        the last pipeline stage. It does not log a mean of 0 or less.
        """


class CheckpointHooks:
    @hook(HookFacts("training loop", "checkpoint", "each"))
    def save_extra(self, state: TrainState) -> dict[str, Any]:  # type: ignore[empty-body]
        """Return data to store in a checkpoint under the name of this feature."""

    @hook(HookFacts("training loop", "checkpoint", proves=False))
    def load_extra(self, state: TrainState, data: dict[str, Any]) -> None:
        """Restore the data that `save_extra` returned."""


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
