"""Every hook a feature may implement, grouped by the object whose life it follows. This file is the reference.

Hooks run in plan order, per step or rarer, never inside a layer. A hook that nobody in the plan
implements is not even wired: its seam on Megatron (`mindspeed.megatron.hook_points`) is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

import pluggy

if TYPE_CHECKING:
    from mindspeed.plugins.patches import ArgOverride, Patch

PROJECT: Final = "mindspeed"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class PlanHooks:
    """Asked while a plan is made; pure, without torch and megatron."""

    @hookspec
    def patches(self) -> list[Patch]:  # type: ignore[empty-body]
        """The patches of this feature, decided from ``self.args`` and ``self.world``."""

    @hookspec
    def megatron_args(self) -> list[ArgOverride]:  # type: ignore[empty-body]
        """Megatron arguments that this feature sets."""


class ArgumentHooks:
    @hookspec
    def config_ready(self, config: Any) -> None:
        """A TransformerConfig has all overrides, and Megatron's own ``__post_init__`` has accepted it."""


class ParallelHooks:
    @hookspec
    def groups_created(self, sizes: dict[str, int], get_group: Callable[[str], Any]) -> None:
        """Model-parallel groups exist. ``sizes`` has tp, pp, cp, dp, ep; ``get_group("tp")`` the group of this rank."""

    @hookspec
    def groups_destroyed(self) -> None:
        """Model-parallel groups are about to be destroyed: drop every group of your own."""

    @hookspec
    def group_options(self, group: str) -> Any:
        """Options of the process group that Megatron is about to create under this name, or None."""


class ModelHooks:
    @hookspec
    def layer_spec(self, spec: Any, config: Any) -> Any:
        """Return the TransformerBlockSubmodules to build, changed or as given. Values are chained in plan order."""

    @hookspec
    def model_built(self, chunks: Sequence[Any]) -> None:
        """All model chunks of this rank exist, before the optimizer does."""


class PipelineHooks:
    @hookspec
    def schedule(self, config: Any) -> Callable[..., Any] | None:
        """The forward-backward function to use instead of Megatron's; only the holder of slot pipeline-schedule."""


class TrainHooks:
    @hookspec
    def around_train_step(self, state: Any) -> AbstractContextManager[None]:  # type: ignore[empty-body]
        """A context manager around one optimizer step, from zeroed gradients to updated weights."""

    @hookspec
    def optimizer_built(self, optimizer: Any) -> None:
        """Megatron's optimizer exists."""


class CheckpointHooks:
    @hookspec
    def save_extra(self, state: Any) -> dict[str, Any]:  # type: ignore[empty-body]
        """What this feature adds to a checkpoint; stored under its name."""

    @hookspec
    def load_extra(self, state: Any, data: dict[str, Any]) -> None:
        """Take back what `save_extra` returned."""


class ProofHooks:
    @hookspec
    def verify(self, report: Any) -> list[str]:  # type: ignore[empty-body]
        """Sentences that say what is wrong with this feature's effect in this process; empty is well."""


HOOK_CLASSES: Final = (
    PlanHooks,
    ArgumentHooks,
    ParallelHooks,
    ModelHooks,
    PipelineHooks,
    TrainHooks,
    CheckpointHooks,
    ProofHooks,
)

CHANGED: Final = {"config_ready": "config", "layer_spec": "spec"}
"""Hooks that are given something to change, and the parameter that has it: one that leaves it as it was did nothing."""

ANSWERED: Final = frozenset({"group_options", "schedule"})
"""Hooks whose answer None means Megatron's own way."""
