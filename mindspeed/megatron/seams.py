"""The one wrap per upstream function and hook: where Megatron calls the hooks of features. Light, data only.

This file and `mindspeed.megatron.wiring` are all there is to adapt for hooks when Megatron changes.
The hooks ``around_train_step``, ``save_extra`` and ``load_extra`` have no seam: a training loop calls them through
``mindspeed.activation.session.call``, since megatron-core has no function that is a whole step or a whole checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from mindspeed.megatron.arguments import PLACES, known_arguments
from mindspeed.megatron.version import package_root
from mindspeed.plugins.feature import Category, Feature, FeatureArgs, FeatureSpec
from mindspeed.plugins.patches import Patch, Wrap


class MegatronSeams(Feature[FeatureArgs]):
    """Call sites of hooks on Megatron; the plan asks `seams_for` for those that it needs."""

    spec = FeatureSpec(
        name="megatron-seams",
        summary="Hook call sites and the argument bridge on Megatron's functions",
        category=Category.PLATFORM,
        level=0,
    )


_CORE: Final = "megatron.core"
_WIRING: Final = "mindspeed.megatron.wiring"
_BRIDGE: Final = "mindspeed.megatron.bridge"

SEAMS: Final[dict[str, Wrap]] = {
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


def seams_for(hooks: Collection[str], overrides: Collection[str]) -> list[Patch]:
    """The wraps that a plan needs: of the hooks its features implement, and of the places that have its overrides.

    ``overrides`` are argument names. Where Megatron's source is not at hand, every place is wrapped.
    """
    bridge = [
        Wrap(
            place.target,
            f"{_BRIDGE}:override_{'fields' if place.target.endswith('__post_init__') else 'parameters'}",
            f"the plan's arguments reach {place.name}",
            phase="setup" if place.name == "initialize_model_parallel" else "build",
        )
        for place in PLACES
        if _takes_any(place.name, overrides)
    ]
    return [*bridge, *(seam for hook, seam in SEAMS.items() if hook in hooks)]


def _takes_any(place: str, overrides: Collection[str]) -> bool:
    root = package_root("core")
    return bool(overrides) and (root is None or not known_arguments(root)[place].isdisjoint(overrides))
