"""What declarations of features for experts have in common. Light: no torch."""

from __future__ import annotations

from typing import Any, ClassVar, Final

from mindspeed.plugins import Check, Feature, FeatureArgs, Mixin, Numerics, Patch, World, hookimpl
from mindspeed.plugins.feature import ArgsT

REORDERED: Final = Numerics.reordered(reason="gradients of a layer's input are added in another order")


def needs_experts(name: str) -> Check:
    """Refuse a dense model for the dispatcher feature ``name``."""
    return Check(
        lambda args, world: world.num_experts > 0,
        "there are no experts to send tokens to, the model is dense",
        fix=f"--num-experts N, or remove {name}",
    )


def are_grouped(args: FeatureArgs, world: World) -> bool:
    """Return whether a world has experts that are one module, whose products can be grouped."""
    has_biases = world.knows("linear_bias") and world.linear_bias
    return bool(world.num_experts > 0 and world.grouped_experts and not has_biases)


class DispatcherFeature(Feature[ArgsT]):
    """Base of a feature that exchanges the methods of Megatron's dispatcher ``kind``, a ``moe_token_dispatcher_type``."""

    kind: ClassVar[str]
    target: ClassVar[str]
    mixin: ClassVar[str]

    @hookimpl
    def config_ready(self, config: Any) -> None:
        from mindspeed.moe.limits import dispatcher_misfits

        if config.num_moe_experts and (wrong := dispatcher_misfits(config, self.kind)):
            self.decline(f"{' and '.join(wrong)} in a model that is being built")

    @hookimpl
    def patches(self) -> list[Patch]:
        place = f"megatron.core.transformer.moe.token_dispatcher:{self.target}"
        return [Mixin(place, self.mixin, reason="its six methods take indices and counts that stay on the device")]
