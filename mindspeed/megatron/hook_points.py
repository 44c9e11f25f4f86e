"""The hook points: every upstream function that is wrapped for the framework, and what happens there. Light, data only.

Each function has one wrap, whatever a plan needs of it: arguments, phases of the run and hooks. Its wrapper stands under
the function's own name in `mindspeed.megatron.hook_wrappers`, or in `mindspeed.megatron.training_hook_wrappers` for the
training loop of Megatron-LM. These three files are all there is to adapt for hooks when Megatron changes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final

from mindspeed.inspection.config_arguments import arguments_of
from mindspeed.inspection.megatron_copies import megatron_version, package_root
from mindspeed.megatron.platform_arguments import PLATFORM_HOOK_POINTS
from mindspeed.plugins.feature import Category, Feature, FeatureArgs, FeatureSpec
from mindspeed.plugins.patches import Patch, Phase, When, Wrap


class MegatronHookPoints(Feature[FeatureArgs]):
    """Owner of the wraps in a plan; the plan asks `hook_points_for` for those that it needs."""

    spec = FeatureSpec(
        name="megatron-hook-points",
        summary="Hook points and argument overrides on Megatron's functions",
        category=Category.PLATFORM,
        level=0,
    )


@dataclass(frozen=True, slots=True)
class HookPoint:
    """Describe an upstream function and everything that its wrapper may do.

    ``arguments`` is the place whose overrides are put in (`mindspeed.inspection.config_arguments.PLACES`), ``hooks`` are
    those that are called. ``run`` says which phase of the run begins or ends, for every plan with a feature; ``loop`` what
    every plan for Megatron-LM's training loop needs.
    """

    target: str
    wrapper: str
    phase: Phase
    hooks: tuple[str, ...] = ()
    arguments: str = ""
    run: str = ""
    loop: str = ""
    when: When | None = None

    def wrap(self, reasons: Collection[str]) -> Wrap:
        """Return the one wrap of this function, with what a plan needs it for."""
        return Wrap(self.target, self.wrapper, "; ".join(reasons), self.when, self.phase)


_CORE: Final = "megatron.core"
_WRAPPERS: Final = "mindspeed.megatron.hook_wrappers"
_CONFIG: Final = f"{_CORE}.transformer.transformer_config"
_SCHEDULES: Final = f"{_CORE}.pipeline_parallel.schedules"
_LAYERS: Final = f"{_CORE}.transformer"

CORE_HOOK_POINTS: Final = (
    HookPoint(
        f"{_CONFIG}:TransformerConfig.__post_init__",
        f"{_WRAPPERS}:transformer_config_post_init",
        "build",
        hooks=("config_ready",),
        arguments="TransformerConfig",
    ),
    HookPoint(
        f"{_CONFIG}:MLATransformerConfig.__post_init__",
        f"{_WRAPPERS}:transformer_config_post_init",
        "build",
        hooks=("config_ready",),
    ),
    HookPoint(
        f"{_LAYERS}.heterogeneous.heterogeneous_config:HeterogeneousTransformerConfig.__post_init__",
        f"{_WRAPPERS}:transformer_config_post_init",
        "build",
        hooks=("config_ready",),
    ),
    HookPoint(
        f"{_CORE}.distributed.distributed_data_parallel_config:DistributedDataParallelConfig.__post_init__",
        f"{_WRAPPERS}:config_post_init",
        "build",
        arguments="DistributedDataParallelConfig",
    ),
    HookPoint(
        f"{_CORE}.optimizer.optimizer_config:OptimizerConfig.__post_init__",
        f"{_WRAPPERS}:config_post_init",
        "build",
        arguments="OptimizerConfig",
    ),
    HookPoint(
        f"{_CORE}.parallel_state:initialize_model_parallel",
        f"{_WRAPPERS}:initialize_model_parallel",
        "setup",
        hooks=("groups_created",),
        arguments="initialize_model_parallel",
        run="set-up ends, the model is built next",
    ),
    HookPoint(
        f"{_CORE}.parallel_state:destroy_model_parallel",
        f"{_WRAPPERS}:destroy_model_parallel",
        "teardown",
        hooks=("groups_destroyed",),
        run="teardown begins",
    ),
    HookPoint(
        f"{_CORE}.parallel_state:get_nccl_options",
        f"{_WRAPPERS}:get_nccl_options",
        "setup",
        hooks=("group_options",),
    ),
    HookPoint(
        f"{_CORE}.models.gpt.gpt_model:GPTModel.__init__",
        f"{_WRAPPERS}:model_init",
        "build",
        arguments="GPTModel",
    ),
    HookPoint(
        f"{_LAYERS}.transformer_block:_get_block_submodules",
        f"{_WRAPPERS}:get_block_submodules",
        "build",
        hooks=("layer_spec",),
    ),
    HookPoint(
        f"{_LAYERS}.multi_token_prediction:_get_mtp_block_submodules",
        f"{_WRAPPERS}:get_block_submodules",
        "build",
        hooks=("layer_spec",),
    ),
    HookPoint(
        f"{_CORE}.optimizer:get_megatron_optimizer",
        f"{_WRAPPERS}:get_megatron_optimizer",
        "build",
        hooks=("model_built", "optimizer_built", "skip_step"),
    ),
    HookPoint(
        f"{_SCHEDULES}:get_forward_backward_func",
        f"{_WRAPPERS}:get_forward_backward_func",
        "step",
        hooks=("schedule", "around_schedule"),
        run="a step or an evaluation begins",
    ),
    HookPoint(
        f"{_SCHEDULES}:forward_step",
        f"{_WRAPPERS}:forward_step",
        "step",
        hooks=("around_forward_step", "around_backward_step"),
    ),
    HookPoint(
        f"{_SCHEDULES}:backward_step",
        f"{_WRAPPERS}:backward_step",
        "step",
        hooks=("around_backward_step",),
    ),
    HookPoint(
        f"{_CORE}.dist_checkpointing.serialization:save",
        f"{_WRAPPERS}:save",
        "checkpoint",
        run="a checkpoint is written",
    ),
)
"""The hook points in megatron-core, which every script passes."""

_TRAINING: Final = "megatron.training"
_TRAINING_WRAPPERS: Final = "mindspeed.megatron.training_hook_wrappers"
_COMPARED: Final = "the plan's arguments come first, and what Megatron makes of all is compared with the plan"

TRAINING_HOOK_POINTS: Final = (
    HookPoint(f"{_TRAINING}.arguments:validate_args", f"{_TRAINING_WRAPPERS}:validate_args", "setup", loop=_COMPARED),
    HookPoint(f"{_TRAINING}.yaml_arguments:validate_yaml", f"{_TRAINING_WRAPPERS}:validate_args", "setup", loop=_COMPARED),
    HookPoint(
        f"{_TRAINING}.checkpointing:save_checkpoint",
        f"{_TRAINING_WRAPPERS}:save_checkpoint",
        "checkpoint",
        loop="a checkpoint records the features that it was saved with",
    ),
    HookPoint(
        f"{_TRAINING}.checkpointing:_load_base_checkpoint",
        f"{_TRAINING_WRAPPERS}:load_base_checkpoint",
        "checkpoint",
        hooks=("load_extra",),
        loop="features that a checkpoint was saved with are compared with the plan's",
    ),
    HookPoint(
        f"{_TRAINING}.training:train_step",
        f"{_TRAINING_WRAPPERS}:train_step",
        "step",
        hooks=("around_train_step", "step_metrics"),
    ),
    HookPoint(
        f"{_TRAINING}.checkpointing:generate_state_dict",
        f"{_TRAINING_WRAPPERS}:generate_state_dict",
        "checkpoint",
        hooks=("save_extra",),
    ),
    HookPoint(
        f"{_TRAINING}.checkpointing:load_checkpoint",
        f"{_TRAINING_WRAPPERS}:load_checkpoint",
        "checkpoint",
        hooks=("load_extra",),
    ),
)
"""The hook points in the training loop of Megatron-LM; another loop calls their hooks through `mindspeed.runtime.session`."""


def hook_points_for(
    hooks: Collection[str],
    overrides: Collection[str],
    training: bool = False,
    megatron: str | None = None,
    phases: bool = False,
) -> list[Patch]:
    """Return the wraps that a plan needs: one for each upstream function where something of it happens.

    ``hooks`` are those that its features implement, ``overrides`` the names of its arguments, ``megatron`` the version that
    it is for, the installed one if not given. Where nothing is known about that, every place of arguments is wrapped.
    ``training`` adds Megatron-LM's training loop, without which only the platform's arguments reach it, ``phases`` the points
    where a phase of the run begins or ends.
    """
    known = arguments_of(megatron or megatron_version()) if overrides else {}
    wraps: list[Patch] = []
    for point in (*CORE_HOOK_POINTS, *(filter(_is_present, TRAINING_HOOK_POINTS) if training else ())):
        has_arguments = point.arguments and (known is None or not known.get(point.arguments, frozenset()).isdisjoint(overrides))
        if reasons := [*_reasons(point, hooks, bool(has_arguments), training, phases)]:
            wraps.append(point.wrap(reasons))
    if not training and package_root("training") is not None:
        wraps += PLATFORM_HOOK_POINTS
    return wraps


def all_hook_patches() -> Iterator[Patch]:
    """Yield the wrap of every hook point, whichever of them a plan may need."""
    for point in (*CORE_HOOK_POINTS, *TRAINING_HOOK_POINTS):
        yield point.wrap(["a plan may need it"])
    yield from PLATFORM_HOOK_POINTS


def _reasons(point: HookPoint, hooks: Collection[str], arguments: bool, training: bool, phases: bool) -> Iterator[str]:
    """Yield what a plan needs a hook point for, in the order in which it happens there."""
    if arguments:
        yield f"the plan's arguments reach {point.arguments}"
    if phases and point.run:
        yield point.run
    if training and point.loop:
        yield point.loop
    if called := [hook for hook in point.hooks if hook in hooks]:
        yield f"hook{'s' if len(called) > 1 else ''} {', '.join(called)}"


def _is_present(point: HookPoint) -> bool:
    """Return whether this Megatron-LM has the module of a hook point, or its source is not at hand."""
    if not point.loop:
        return True
    root = package_root("training")
    module = point.target.partition(":")[0].removeprefix("megatron.")
    return root is None or root.joinpath(*module.split(".")).with_suffix(".py").is_file()
