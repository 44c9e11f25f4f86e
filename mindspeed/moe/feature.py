"""What declarations of features for experts have in common. Light: no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Final

from mindspeed.plugins import Check, Condition, Feature, FeatureArgs, Mixin, Numerics, Patch, World, hookimpl
from mindspeed.plugins.feature import ArgsT

REORDERED: Final = Numerics.reordered(reason="gradients of a layer's input are added in another order")


def needs_experts(name: str) -> Condition:
    """Refuse a dense model for the dispatcher feature ``name``."""
    return Check(
        lambda args, world: world.num_experts > 0,
        "there are no experts to send tokens to, the model is dense",
        fix=f"--num-experts N, or remove {name}",
    )


_UNSERVED: Final = {
    "low_precision": (
        "linear layers multiply in fp8 or fp4",
        "--no-low-precision (Megatron-LM: no --fp8-format, --fp4-format)",
    ),
    "cuda_graphs": ("layers are captured as CUDA graphs", "--no-cuda-graphs (Megatron-LM: --cuda-graph-impl none)"),
    "latent_expert_size": ("experts work on latent vectors", "--latent-expert-size 0 (Megatron-LM: no --moe-latent-size)"),
    "transformer_engine_experts": (
        "experts are Transformer Engine's grouped ones",
        "--no-transformer-engine-experts (Megatron-LM: --transformer-impl local)",
    ),
    "overlapped_micro_batches": (
        "Megatron hides the transfers behind another micro-batch (overlap_moe_expert_parallel_comm)",
        "--no-overlapped-micro-batches (Megatron-LM: no --overlap-moe-expert-parallel-comm)",
    ),
}
"""Fields of a world that some features for experts do not serve where they are set, in words, with what to change."""

_BY_DISPATCHERS: Final = ("low_precision", "cuda_graphs", "latent_expert_size", "overlapped_micro_batches")


def unserved(name: str, *fields: str) -> tuple[Condition, ...]:
    """Refuse for the feature ``name`` a world in which one of ``fields`` is set; those of dispatchers if none is given.

    What nobody knows yet passes: the configuration of the model is judged once more when it is built.
    """

    def served(field: str) -> Callable[[Any, World], bool]:
        return lambda args, world: not is_set(world, field)

    chosen = {field: _UNSERVED[field] for field in fields or _BY_DISPATCHERS}
    return tuple(
        Check(served(field), f"{sentence}, which {name} does not serve", fix=f"{fix}, or remove {name}")
        for field, (sentence, fix) in chosen.items()
    )


def is_set(world: World, field: str) -> bool:
    """Return whether a field of a world is known and neither false nor 0."""
    return world.is_set(field)


def are_grouped(args: FeatureArgs, world: World) -> bool:
    """Return whether a world has experts that are one module, whose products can be grouped."""
    others = ("linear_bias", "low_precision", "latent_expert_size", "transformer_engine_experts")
    return bool(world.num_experts > 0 and world.grouped_experts and not any(is_set(world, field) for field in others))


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


class OverlapFeature(Feature[ArgsT]):
    """Base of a feature that computes shared experts, and defers weight gradients of grouped ones, under transfers."""

    @hookimpl
    def config_ready(self, config: Any) -> None:
        if not (config.num_moe_experts and config.moe_shared_expert_intermediate_size):
            return
        if config.recompute_granularity == "selective" and "shared_experts" in (config.recompute_modules or ()):
            self.decline("recompute_modules has shared_experts, which hide transfers, in a model that is being built")
        config.moe_shared_expert_overlap = True  # Megatron's own check lets only the all-to-all dispatcher have it

    @hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        if config.num_moe_experts:
            decline_other_experts(self, spec)
        return spec


def decline_other_experts(feature: Feature[ArgsT], spec: Any) -> None:
    """Refuse a spec with experts that are not grouped ones of this library."""
    from mindspeed.moe.limits import has_other_experts

    if has_other_experts(spec):
        feature.decline("the layer spec has experts that are not grouped ones of this library, such as Transformer Engine's")
