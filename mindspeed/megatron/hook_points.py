"""The one wrap per upstream function and hook: where Megatron calls the hooks of features. Light, data only.

This file, `mindspeed.megatron.hook_wrappers` and `mindspeed.megatron.training_hook_wrappers` are all there is to adapt for
hooks when Megatron changes. megatron-core has no function that is a whole step or a whole checkpoint, so ``around_train_step``,
``save_extra`` and ``load_extra`` have their seams on Megatron-LM's training loop; another loop calls them through
``mindspeed.runtime.session.call``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

from mindspeed.inspection.config_arguments import PLACES, ArgumentPlace, arguments_of
from mindspeed.inspection.megatron_copies import megatron_version, package_root
from mindspeed.megatron.run_phases import PHASES
from mindspeed.plugins.feature import Category, Feature, FeatureArgs, FeatureSpec
from mindspeed.plugins.patches import Patch, Wrap


class MegatronHookPoints(Feature[FeatureArgs]):
    """Call sites of hooks on Megatron; the plan asks `hook_points_for` for those that it needs."""

    spec = FeatureSpec(
        name="megatron-seams",
        summary="Hook call sites and the argument bridge on Megatron's functions",
        category=Category.PLATFORM,
        level=0,
    )


_CORE: Final = "megatron.core"
_WIRING: Final = "mindspeed.megatron.hook_wrappers"
_BRIDGE: Final = "mindspeed.megatron.argument_overrides"

HOOK_POINTS: Final[dict[str, Wrap]] = {
    "config_ready": Wrap(
        f"{_CORE}.transformer.transformer_config:TransformerConfig.__post_init__",
        f"{_WIRING}:with_config_ready",
        "features look at a configuration that Megatron has accepted",
        phase="build",
    ),
    "groups_created": Wrap(
        f"{_CORE}.parallel_state:initialize_model_parallel",
        f"{_WIRING}:with_groups_created",
        "features make groups of their own beside Megatron's",
        phase="setup",
    ),
    "groups_destroyed": Wrap(
        f"{_CORE}.parallel_state:destroy_model_parallel",
        f"{_WIRING}:with_groups_destroyed",
        "features drop their groups before Megatron drops its own",
        phase="teardown",
    ),
    "group_options": Wrap(
        f"{_CORE}.parallel_state:get_nccl_options",
        f"{_WIRING}:with_group_options",
        "features choose the options of Megatron's groups",
        phase="setup",
    ),
    "layer_spec": Wrap(
        f"{_CORE}.transformer.transformer_block:_get_block_submodules",
        f"{_WIRING}:with_layer_spec",
        "features exchange modules of the layers that a block builds",
        phase="build",
    ),
    "model_built": Wrap(
        f"{_CORE}.optimizer:get_megatron_optimizer",
        f"{_WIRING}:with_model_built",
        "features see the finished model before its optimizer is made",
        phase="build",
    ),
    "optimizer_built": Wrap(
        f"{_CORE}.optimizer:get_megatron_optimizer",
        f"{_WIRING}:with_optimizer_built",
        "features see the finished optimizer",
        phase="build",
    ),
    "schedule": Wrap(
        f"{_CORE}.pipeline_parallel.schedules:get_forward_backward_func",
        f"{_WIRING}:with_schedule",
        "a feature brings a pipeline schedule of its own",
    ),
}
"""The seam of every hook that megatron-core calls."""

PREDICTION: Final = Wrap(
    f"{_CORE}.transformer.multi_token_prediction:_get_mtp_block_submodules",
    f"{_WIRING}:with_layer_spec",
    "features exchange modules of the layers that predict further tokens as well",
    phase="build",
    optional=True,
)
"""The second seam of the hook ``layer_spec``: layers of multi-token prediction have a specification of their own."""


_TRAINING: Final = "megatron.training"
_TRAINING_WIRING: Final = "mindspeed.megatron.training_hook_wrappers"
_COMPARED: Final = "the plan's arguments come first, and what Megatron makes of all is compared with the plan"

ARGUMENT_HOOK_POINTS: Final[tuple[Wrap, ...]] = (
    Wrap(f"{_TRAINING}.arguments:validate_args", f"{_TRAINING_WIRING}:with_plan_arguments", _COMPARED, phase="setup"),
    Wrap(f"{_TRAINING}.yaml_arguments:validate_yaml", f"{_TRAINING_WIRING}:with_plan_arguments", _COMPARED, phase="setup"),
)
"""Where Megatron-LM's parsed arguments become those of the run."""

CHECKPOINT_HOOK_POINTS: Final[tuple[Wrap, ...]] = (
    Wrap(
        f"{_TRAINING}.checkpointing:save_checkpoint",
        f"{_TRAINING_WIRING}:with_record_saved",
        "a checkpoint remembers the features that it was saved with",
        phase="checkpoint",
    ),
    Wrap(
        f"{_TRAINING}.checkpointing:_load_base_checkpoint",
        f"{_TRAINING_WIRING}:with_record_compared",
        "features that a checkpoint was saved with are compared with the plan's",
        phase="checkpoint",
    ),
)
"""Where Megatron-LM's checkpoints carry the plan."""

_TAKE_BACK: Final = "features take back what a checkpoint has of them"

TRAINING_HOOK_POINTS: Final[dict[str, tuple[Wrap, ...]]] = {
    "around_train_step": (
        Wrap(
            f"{_TRAINING}.training:train_step",
            f"{_TRAINING_WIRING}:with_train_step",
            "features stand around a whole step",
        ),
    ),
    "save_extra": (
        Wrap(
            f"{_TRAINING}.checkpointing:generate_state_dict",
            f"{_TRAINING_WIRING}:with_save_extra",
            "features add what they keep to a checkpoint",
            phase="checkpoint",
        ),
    ),
    "load_extra": (
        Wrap(
            f"{_TRAINING}.checkpointing:_load_base_checkpoint",
            f"{_TRAINING_WIRING}:with_load_extra",
            _TAKE_BACK,
            phase="checkpoint",
        ),
        Wrap(
            f"{_TRAINING}.checkpointing:load_checkpoint",
            f"{_TRAINING_WIRING}:with_loaded_checkpoint",
            _TAKE_BACK,
            phase="checkpoint",
        ),
    ),
}
"""The seams of every hook that only a training loop can call, on Megatron-LM's."""


def hook_points_for(
    hooks: Collection[str], overrides: Collection[str], training: bool = False, megatron: str | None = None
) -> list[Patch]:
    """The wraps that a plan needs: of the hooks its features implement, and of the places that have its overrides.

    ``overrides`` are argument names, ``megatron`` is the version that the plan is for, the one at hand if not given. Where
    nothing is known about it, every place is wrapped. With ``training`` those on Megatron-LM's training loop belong to them.
    """
    known = arguments_of(megatron or megatron_version()) if overrides else {}
    bridge = [
        Wrap(
            place.target,
            f"{_BRIDGE}:override_{'fields' if place.target.endswith('__post_init__') else 'parameters'}",
            _reaches(place),
            phase="setup" if place.name == "initialize_model_parallel" else "build",
        )
        for place in PLACES
        if known is None or not known.get(place.name, frozenset()).isdisjoint(overrides)
    ]
    loop = [seam for hook, seams in TRAINING_HOOK_POINTS.items() if hook in hooks for seam in seams]
    above = [*filter(_is_there, (*ARGUMENT_HOOK_POINTS, *CHECKPOINT_HOOK_POINTS)), *loop] if training else []
    core = [seam for hook, seam in HOOK_POINTS.items() if hook in hooks]
    return [*bridge, *core, *([PREDICTION] if "layer_spec" in hooks else []), *above]


def all_hook_patches() -> Iterator[Patch]:
    """Every patch that a plan may need for hooks, run phases and arguments."""
    yield from (*HOOK_POINTS.values(), PREDICTION, *ARGUMENT_HOOK_POINTS, *CHECKPOINT_HOOK_POINTS, *PHASES)
    yield from (seam for seams in TRAINING_HOOK_POINTS.values() for seam in seams)
    yield from (Wrap(place.target, f"{_BRIDGE}:override_fields", _reaches(place)) for place in PLACES)


def _reaches(place: ArgumentPlace) -> str:
    return f"the plan's arguments reach {place.name}"


def _is_there(seam: Wrap) -> bool:
    """Whether this Megatron-LM has the module of a seam; without its source at hand it is taken for granted."""
    root = package_root("training")
    module = seam.target.partition(":")[0].removeprefix("megatron.")
    return root is None or root.joinpath(*module.split(".")).with_suffix(".py").is_file()
