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
    from mindspeed.plugins.saved_tensors import SavedTensors
    from mindspeed.process.variables import ProcessVariable

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
        """Return the patches of this feature: the functions of Megatron to change, and what each becomes.

        Patches may depend on ``self.args``, the settings of the feature, and on ``self.world``, the sizes and model of the job.
        """

    @hook(HookFacts("plan", answers="each", proves=False))
    def megatron_args(self) -> list[ArgOverride]:  # type: ignore[empty-body]
        """Return the arguments of Megatron that this feature sets, each with a value and the reason for it."""

    @hook(HookFacts("plan", answers="each", proves=False))
    def notes(self) -> Iterable[str]:  # type: ignore[empty-body]
        """Return sentences that explain the effect of the settings in this job. The plan shows each as a note."""

    @hook(HookFacts("plan", answers="each", none="every slot of the declaration", proves=False))
    def held_slots(self) -> Collection[str] | None:
        """Return those slots of ``FeatureSpec.slots`` that the feature needs with its current settings.

        A slot is a role that only one active feature can have, such as the pipeline schedule.
        """

    @hook(HookFacts("plan", answers="merged", none="no values", proves=False))
    def job_values(self) -> Mapping[str, Any] | None:
        """Return sizes and model options of the job that follow from the settings of this feature.

        Each is given by its name in ``self.world``, such as ``{"shared_expert_hidden_size": 1024}``.
        A value that the user has given is not changed.
        """

    @hook(HookFacts("plan", answers="one", none="equal shares", proves=False))
    def layer_split(self) -> Sequence[int] | None:
        """Return how many transformer layers each model chunk has. The chunk with the first layers comes first.

        Implement it in a feature that gives model chunks different numbers of layers.
        """

    @hook(HookFacts("plan", answers="merged", none="no variables", proves=False))
    def process_variables(self) -> Mapping[str, ProcessVariable] | None:
        """Return environment variables that must be set before processes of the job start, because libraries read them once."""

    @hook(HookFacts("plan", answers="each", none="every step", proves=False))
    def working_steps(self) -> tuple[int, int] | None:
        """Return the first and the last training step in which the feature does something.

        `mindspeed pretrain` refuses a run that has none of these steps.
        """


class PlannerHooks:
    """Called by the planner of memory and by the search of a layout; pure, without torch and megatron."""

    @hook(HookFacts("planner", answers="chained", none="the tensors, unchanged", value="tensors", proves=False))
    def saved_tensors(self, tensors: SavedTensors) -> SavedTensors | None:
        """Return a list of the tensors that layers save for backward. Memory planning adds up their sizes.

        ``tensors`` is this list for a job without the feature. Return the list with changed entries for the tensors that the
        feature frees or offloads. The function `mindspeed.plugins.saved_tensors.leave` returns such a list. For example,
        ``leave(tensors, {"norm"}, "recomputed", "my-feature")`` means that my-feature frees the tensors named norm and
        recomputes them in backward. For tensors that the feature offloads to host memory, give "swapped". Return None to
        leave the list unchanged.
        """

    @hook(HookFacts("planner", answers="chained", none="the tensors, unchanged", value="tensors", proves=False))
    def resting(self, tensors: SavedTensors) -> SavedTensors | None:
        """Return a list of the tensors that the optimizer keeps between two steps. Memory planning adds up their sizes.

        ``tensors`` is this list for a job without the feature. Its entries are named "main weights", "residuals" and "states".
        Return the list with changed entries for the tensors that the feature frees or offloads. The function
        `mindspeed.plugins.saved_tensors.leave` returns such a list. For example,
        ``leave(tensors, {"main weights"}, "swapped", "my-feature")`` means that my-feature offloads the main weights to host
        memory ("swapped"). For tensors that the feature frees and computes again, give "recomputed". Return None to leave the
        list unchanged.
        """

    @hook(HookFacts("planner", answers="each", none="nothing", proves=False))
    def estimate(self) -> Estimate | None:
        """Return the computation and communication that this feature adds.

        Give each value for the rank on which it is largest.

        The layout search compares many layouts at once, so the sizes in ``self.world`` are arrays with one element
        per layout. Compute with plain arithmetic, without ``if``.
        """

    @hook(HookFacts("planner", answers="each", none="the search skips this configuration", proves=False))
    def variants(self) -> Sequence[Mapping[str, Any]] | None:
        """Return the combinations of settings that the layout search tries, such as ``[{"parts": 2}, {"parts": 4}]``.

        The search also tries the job without this feature.
        """

    @hook(HookFacts("planner", answers="each", none="the feature cannot be chosen automatically", proves=False))
    def cost(self) -> Cost | None:
        """Return what this feature costs in this job, such as the bytes that it sends.

        If the user lets mindspeed choose among features, such as with ``context-parallel.algorithm=auto``, it uses the
        feature with the lowest cost.
        """

    @hook(HookFacts("planner", answers="each", none="no communicators", proves=False))
    def communicators(self) -> Sequence[str] | None:
        """Return the communicators of the process groups that this feature creates, on the rank that has most.

        Name each by the ``group_desc`` of its group. Add `mindspeed.platforms.backend_rules.PAIR` where it has two ranks of the
        group. Plans show their number and memory.
        """

    @hook(HookFacts("planner", answers="each", none="no limit", proves=False))
    def budget(self) -> tuple[str, float] | None:
        """Return the name of the setting that limits the device memory of a rank, and the limit in MiB.

        A job is refused if the memory estimate of a rank exceeds the limit.
        """


class SessionHooks:
    """The life of a plan in one process."""

    @hook(HookFacts("session", proves=False))
    def activated(self) -> None:
        """Do what this feature needs once per process. mindspeed has just applied the patches of the plan to Megatron."""

    @hook(HookFacts("session", proves=False))
    def deactivated(self) -> None:
        """Undo what `activated` did, and close what the feature has opened. mindspeed has just removed all patches."""

    @hook(HookFacts("session", proves=False))
    def run_failed(self, error: BaseException) -> None:
        """Handle an error that ends the run, for example by telling a fault-tolerance service. The process ends afterwards."""


class ArgumentHooks:
    @hook(HookFacts("megatron-core", "build", value="config"))
    def config_ready(self, config: Any) -> None:
        """Inspect or change a configuration of Megatron (TransformerConfig), just after it was created.

        Megatron's ``__post_init__`` has validated it, and it contains the arguments that all features set.
        """


class ParallelHooks:
    @hook(HookFacts("megatron-core", "setup"))
    def groups_created(self, sizes: dict[str, int], get_group: Callable[[str], Any]) -> None:
        """Create the process groups of this feature. Megatron's model-parallel groups exist already.

        ``sizes`` maps tp, pp, cp, dp and ep to their sizes. ``get_group("tp")`` returns Megatron's
        tensor-parallel group that contains this rank.
        """

    @hook(HookFacts("megatron-core", "teardown"))
    def groups_destroyed(self) -> None:
        """Destroy the process groups that `groups_created` made. Megatron destroys its model-parallel groups afterwards."""

    @hook(HookFacts("megatron-core", "setup", "merged", "Megatron's default options", proves=False))
    def group_options(self, group: str) -> Any:
        """Return options for a process group that Megatron is about to create.

        ``group`` is Megatron's name for the group, such as ``dp_cp``. Options are an object of the backend, such as
        ``ProcessGroupNCCL.Options``, or a dictionary ``{field: value}``.
        """


class ModelHooks:
    @hook(HookFacts("megatron-core", "build", "chained", "the specification, unchanged", value="spec"))
    def layer_spec(self, spec: Any, config: Any) -> Any:
        """Return the specification from which Megatron builds the layers of a model (TransformerBlockSubmodules).

        Return ``spec`` or a changed copy of it, for example with another module as the MLP.
        """

    @hook(HookFacts("megatron-core", "build"))
    def model_built(self, chunks: Sequence[Any]) -> None:
        """Inspect or change the model, after Megatron has built it and before it creates the optimizer.

        ``chunks`` are the model chunks of this rank.
        """


class PipelineHooks:
    @hook(HookFacts("megatron-core", "step", "one", "Megatron's schedule"))
    def schedule(self, config: Any) -> Callable[..., Any] | None:
        """Return the function that runs the forward and backward passes of a step, in place of Megatron's pipeline schedule.

        Called only for the feature that holds the slot ``pipeline-schedule``, a role that only one active feature can have.
        """

    @hook(HookFacts("megatron-core", "step", "each", "nothing around this pass"))
    def around_schedule(
        self, chunks: Sequence[Any], forward_only: bool, micro_batches: int
    ) -> AbstractContextManager[None] | None:
        """Return a context manager that encloses all forward and backward passes of one training step.

        In evaluation, ``forward_only`` is true and there are no backward passes.
        """

    @hook(HookFacts("megatron-core", "step", "each", "nothing around loading"))
    def around_data_load(self) -> AbstractContextManager[None] | None:
        """Return a context manager that encloses loading the next micro-batch from a data iterator."""

    @hook(HookFacts("megatron-core", "step", "each", "nothing around this unit"))
    def around_forward_step(self, unit: Unit) -> AbstractContextManager[None] | None:
        """Return a context manager that encloses the forward pass of one micro-batch in one model chunk.

        With ``overlap_moe_expert_parallel_comm``, this hook is not called, because Megatron runs the forward pass of one
        micro-batch together with the backward pass of another.
        """

    @hook(HookFacts("megatron-core", "step", "each", "nothing around this unit"))
    def around_backward_step(self, unit: Unit) -> AbstractContextManager[None] | None:
        """Return a context manager that encloses the backward pass of one micro-batch in one model chunk.

        With ``overlap_moe_expert_parallel_comm``, this hook is not called, because Megatron runs the backward pass of one
        micro-batch together with the forward pass of another.
        """


class TrainHooks:
    @hook(HookFacts("training loop", "step", "each", "nothing around this step"))
    def around_train_step(self, state: TrainState) -> AbstractContextManager[None] | None:
        """Return a context manager that encloses one training step, from zeroing the gradients to updating the weights."""

    @hook(HookFacts("megatron-core", "step"))
    def gradients_ready(self, chunks: Sequence[Any], gradients: Sequence[tuple[str, Any]]) -> None:
        """Inspect the gradients of a step, or change them in place, before the optimizer uses them.

        Megatron has summed the gradients over micro-batches and ranks. ``chunks`` are the model chunks of this rank.
        ``gradients`` has a pair for each trained parameter: its name and its gradient. With the distributed optimizer, only
        the part of a gradient that this rank updates is summed.
        """

    @hook(HookFacts("megatron-core", "build"))
    def optimizer_built(self, optimizer: Any) -> None:
        """Inspect or change the optimizer, after Megatron has built it and before the first step."""

    @hook(HookFacts("training loop", "step", "each", "no numbers", proves=False))
    def step_metrics(self, state: TrainState) -> Mapping[str, float] | None:
        """Return numbers about the finished step, by name, for the training log.

        The name ``load`` is logged as ``NAME-OF-THE-FEATURE.load``; a name with a dot is logged as it is. `mindspeed pretrain`
        logs the numbers of rank 0. Megatron-LM logs those of the last pipeline stage, as means over ``--log-interval`` steps,
        and omits means of 0 or less.
        """

    @hook(HookFacts("training loop", "step"))
    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log numbers of a step, by name, such as the loss and those of `step_metrics`, or of an evaluation after it.

        Called on rank 0 of `mindspeed pretrain` after each step, and after each evaluation. With Megatron-LM it is called on
        the last rank after each step, with ``loss``, ``seconds`` and the other losses.
        """


class CheckpointHooks:
    @hook(HookFacts("training loop", "checkpoint", "each", "nothing around saving"))
    def around_save(self, step: int) -> AbstractContextManager[None] | None:
        """Return a context manager that encloses saving a checkpoint: it begins, and ends or fails, with the save."""

    @hook(HookFacts("training loop", "checkpoint", "each"))
    def save_extra(self, state: TrainState) -> dict[str, Any]:  # type: ignore[empty-body]
        """Return data of this feature to store in a checkpoint that is being saved."""

    @hook(HookFacts("training loop", "checkpoint", proves=False))
    def load_extra(self, state: TrainState, data: dict[str, Any]) -> None:
        """Restore ``data``, which `save_extra` returned when the checkpoint was saved. Called when training resumes from it."""


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
