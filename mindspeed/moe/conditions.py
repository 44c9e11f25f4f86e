"""Declarations that several features for experts share: bases, and conditions with each fact, sentence and fix once. Light."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from mindspeed.plugins import Condition, Feature, Fix, Mixin, Numerics, Patch, World, condition, hookimpl
from mindspeed.plugins.feature import ArgsT
from mindspeed.plugins.shared_conditions import NO_CUDA_GRAPHS, NO_LOW_PRECISION, NO_OVERLAPPED_MICRO_BATCHES

_REMOVE: Final = Fix.remove_feature()

NO_LATENT_EXPERTS: Final = Condition.unset(
    "latent_expert_size", "experts work on latent vectors of width {world.latent_expert_size}, which {feature} does not support"
)
NO_PADDED_ROUTING: Final = Condition.unset(
    "padded_routing", "the inputs of experts are padded for fp8 or fp4 matrix products, which {feature} does not support"
)
NO_FORCED_BALANCING: Final = Condition.unset(
    "forced_balancing", "the router distributes tokens evenly and ignores their scores, which {feature} does not support"
)
NO_LINEAR_BIAS: Final = Condition.unset("linear_bias", "linear layers have biases, which {feature} does not support")


def is_sparse(args: Any, world: World) -> bool:
    """Return whether the model has experts."""
    return world.num_experts > 0


DISPATCHER_CONDITIONS: Final = (
    NO_LOW_PRECISION,
    NO_CUDA_GRAPHS,
    NO_LATENT_EXPERTS,
    NO_OVERLAPPED_MICRO_BATCHES,
    NO_PADDED_ROUTING,
)
"""Conditions of features that move tokens to experts by transfers of their own."""


experts_are_spread = Condition.at_least(
    "ep", 2, "expert parallelism is off (ep={world.ep}), so {feature} has no transfer to overlap"
)


@condition(
    "recompute_modules contains shared_experts, which {feature} overlaps with transfers",
    fix=(Fix.give_field("recompute_modules", note="N = your list of modules, without shared_experts"), _REMOVE),
)
def shared_experts_are_kept(args: Any, world: World) -> bool:
    """Check that shared experts, which hide transfers, are not recomputed."""
    recomputed = world.recompute_granularity == "selective" and "shared_experts" in world.recompute_modules
    return not (recomputed and world.is_set("shared_expert_hidden_size"))


def _overlap_is_not_known(args: Any, world: World) -> bool:
    """Return whether shared-expert overlap is not set in the job."""
    return not world.is_set("shared_expert_overlap")


def keeps_modules_whole(other: str) -> Condition:
    """Require that the feature ``other``, which recomputes modules, has no shared experts that run in steps."""

    @condition(
        f"{{feature}} overlaps shared experts with transfers, which {other} does not support",
        fix=(Fix.remove_feature(other), _REMOVE),
        when=_overlap_is_not_known,
        of=other,
    )
    def modules_are_whole(args: Any, world: World, other: Any) -> bool:
        """Check that shared experts, which hide transfers, are not recomputed by another feature."""
        return not world.is_set("shared_expert_hidden_size")

    return modules_are_whole


def needs_dispatcher(kind: str) -> Condition:
    """Require that Megatron's dispatcher is of a kind, a ``moe_token_dispatcher_type``."""

    @condition(
        f"Megatron's dispatcher is {{world.dispatcher}}, but {{feature}} replaces the {kind} dispatcher",
        fix=(Fix.give_field("dispatcher", kind), _REMOVE),
    )
    def dispatcher_fits(args: Any, world: World) -> bool:
        """Check that the dispatcher is the one that the feature replaces."""
        return not world.knows("dispatcher") or world.dispatcher == kind

    return dispatcher_fits


_NOT_GROUPED: Final = (
    "linear_bias",
    "low_precision",
    "latent_expert_size",
    "transformer_engine_layers",
    "transformer_engine_experts",
    "clamped_activation",
    "shifted_gate",
)
"""Fields of a job whose experts grouped products cannot compute."""


@condition(
    "this feature needs a MoE model with moe_grouped_gemm and Megatron's local experts. The experts must not use biases, fp8, "
    "fp4, moe_latent_size, activation_func_clamp_value, glu_linear_offset, or moe_apply_probs_on_input with router_topk > 1",
    otherwise="skip",
)
def experts_are_grouped(args: Any, world: World) -> bool:
    """Check that the model has experts that are one module, whose products can be grouped."""
    if world.num_experts == 0 or not world.grouped_experts or any(map(world.is_set, _NOT_GROUPED)):
        return False
    return not world.is_set("probabilities_on_input") or world.router_topk == 1


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
