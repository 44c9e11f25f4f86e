"""plan-agreement: the ranks of a job agree on their plan before they have a process group."""

from __future__ import annotations

from inspect import signature
from typing import Any

from mindspeed.plugins import Category, Feature, FeatureArgs, FeatureSpec, Patch, Wrap, hookimpl
from mindspeed.plugins.patches import Function, wrapper


class PlanAgreement(Feature[FeatureArgs]):
    """Stop a job whose ranks have different plans, and tell all ranks why one of them has failed."""

    spec = FeatureSpec(
        name="plan-agreement",
        category=Category.PLATFORM,
        level=0,
    )

    @hookimpl
    def patches(self) -> list[Patch]:
        return [
            Wrap(
                "torch.distributed.distributed_c10d:init_process_group",
                f"{__name__}:agree_first",
                reason="compares the plans of all ranks before the first collective, so that ranks with different plans stop "
                "instead of hanging",
                phase="setup",
            )
        ]


@wrapper
def agree_first(init_process_group: Function, *args: Any, **kwargs: Any) -> Any:
    """``init_process_group``."""
    from mindspeed.engine.runtime import rendezvous

    return rendezvous.around_init(init_process_group, signature(init_process_group).bind(*args, **kwargs).arguments)
