"""Common parts of the declarations of features for experts. Light: no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from mindspeed.plugins import Feature, Mixin, Numerics, Patch, hookimpl
from mindspeed.plugins.feature import ArgsT

REORDERED: Final = Numerics.reordered(reason="gradients of a layer's input are summed in a different order than in Megatron")


class DispatcherFeature(Feature[ArgsT]):
    """Base of a feature that exchanges the methods of a dispatcher of Megatron."""

    target: ClassVar[str]
    mixin: ClassVar[str]

    @hookimpl
    def patches(self) -> list[Patch]:
        place = f"megatron.core.transformer.moe.token_dispatcher:{self.target}"
        return [
            Mixin(
                place,
                self.mixin,
                reason="computes token indices and counts on the device, so that the host waits for the device less often",
            )
        ]


class OverlapFeature(Feature[ArgsT]):
    """Base of a feature that computes shared experts, and defers weight gradients of grouped ones, under transfers."""

    @hookimpl
    def job_values(self) -> Mapping[str, Any]:
        return {"shared_expert_overlap": True} if self.world.is_set("shared_expert_hidden_size") else {}

    @hookimpl
    def config_ready(self, config: Any) -> None:
        if config.moe_shared_expert_intermediate_size:
            config.moe_shared_expert_overlap = True  # Megatron's own check lets only the all-to-all dispatcher have it
