"""Packages that only CUDA devices have, that Megatron needs and no feature provides. Light."""

from __future__ import annotations

from typing import Any, Final

from mindspeed import plugins as ms
from mindspeed.engine.resolution.environment import version_in


def _builds_local_groups(args: Any, world: ms.World) -> bool:
    """Return whether Megatron builds its own grouped experts, which it does from 0.17 on only with Transformer Engine."""
    is_grouped = world.is_set("num_experts") and world.is_set("grouped_experts")
    is_local = world.knows("transformer_engine_experts") and not world.transformer_engine_experts
    return is_grouped and is_local and world.knows("megatron") and version_in(world.megatron, "<0.17")


GROUPED_EXPERTS: Final = ms.RequiresSlot(
    ms.Slot.GROUPED_EXPERTS,
    "Megatron's local grouped experts need the package grouped_gemm, whose kernels need CUDA",
    _builds_local_groups,
    fix=(ms.Fix.give_field("grouped_experts", False),),
)


def _updates_on_the_device(args: Any, world: ms.World) -> bool:
    """Return whether Adam would be that of Transformer Engine, where none is installed."""
    return not (world.is_set("offloaded_optimizer") or world.is_set("engine_installed"))


PRECISION_AWARE: Final = ms.Condition.unset(
    "precision_aware_optimizer",
    "the precision-aware optimizer needs FusedAdam of Transformer Engine, which is not installed",
    (ms.Fix.give_field("precision_aware_optimizer", False),),
    _updates_on_the_device,
)


def _has_no_engine(args: Any, world: ms.World) -> bool:
    return not world.is_set("engine_installed")


OFFLOADING: Final = ms.Condition.unset(
    "cpu_offloading",
    "the offloading of activations needs Transformer Engine, which is not installed",
    (ms.Fix.give_field("cpu_offloading", False),),
    _has_no_engine,
)
