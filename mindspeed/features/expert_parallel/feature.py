"""Experts of a MoE layer spread over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mindspeed import plugins as ms
from mindspeed.features.expert_parallel.choice import NEEDED, ExpertParallelArgs, cheaper_dispatcher, describe_choice
from mindspeed.plugins.shared_conditions import has_experts


def has_tensor_ranks(args: Any, world: ms.World) -> bool:
    """Return whether there are several tensor-parallel ranks."""
    return world.tp > 1


def _follows_tensor_size(args: ExpertParallelArgs, world: ms.World) -> bool:
    """Return whether expert_tensor_size is not set."""
    return args.expert_tensor_size is None


def _has_tensor_size(args: ExpertParallelArgs, world: ms.World) -> bool:
    """Return whether the number of ranks that share one expert is given."""
    return args.expert_tensor_size is not None


def _is_auto(args: ExpertParallelArgs, world: ms.World) -> bool:
    """Return whether mindspeed chooses the dispatcher."""
    return args.dispatcher == "auto"


def _is_flex(args: ExpertParallelArgs, world: ms.World) -> bool:
    """Return whether Megatron's flex dispatcher is chosen."""
    return args.dispatcher == "flex"


def _splits_biased_experts(args: ExpertParallelArgs, world: ms.World) -> bool:
    """Return whether several tensor-parallel ranks share an expert with biases."""
    return bool((args.expert_tensor_size or world.tp) > 1 and world.linear_bias)


@ms.condition(
    "world size {world.world_size} is not a multiple of expert_tensor_size x ep x pp = "
    "{args.expert_tensor_size} x {args.size} x {world.pp}",
    fix=(
        ms.Fix.give_field("ep", note="so that expert_tensor_size x ep x pp divides {world.world_size}"),
        ms.Fix.give_setting("expert_tensor_size", 1),
    ),
    when=_has_tensor_size,
)
def ranks_hold_experts_of_given_size(args: ExpertParallelArgs, world: ms.World) -> bool:
    """Check that the ranks suffice for experts of which each takes the given number of ranks."""
    return bool(world.world_size % ((args.expert_tensor_size or 1) * args.size * world.pp) == 0)


@ms.condition(
    f"dispatcher=auto estimates transfers from {', '.join(NEEDED)}, but some of these are not set",
    fix=(ms.Fix.advise("set all of these values"), ms.Fix.give_setting("dispatcher", "alltoall")),
    when=_is_auto,
)
def bytes_are_known(args: ExpertParallelArgs, world: ms.World) -> bool:
    """Check that the bytes of both dispatchers can be computed."""
    return all(world.knows(name) for name in NEEDED)


@ms.condition(
    "dispatcher=flex sends tokens to other ranks, but every rank has all experts whole",
    fix=(ms.Fix.give_setting("dispatcher", "alltoall"),),
    when=_is_flex,
)
def flex_has_other_ranks(args: ExpertParallelArgs, world: ms.World) -> bool:
    """Check that the flex dispatcher has ranks to send tokens to, which Megatron's class asserts."""
    return args.size * (args.expert_tensor_size or world.tp) > 1


class ExpertParallel(ms.Feature[ExpertParallelArgs]):
    """Distribute the experts of MoE layers over ranks.

    Tokens are sent to the ranks of their experts and back.
    """

    spec = ms.FeatureSpec(
        name="expert-parallel",
        category=ms.Category.MEGATRON,
        level=0,
        sizes={"ep": "size"},
        constraints=(
            has_experts,
            ms.Condition.divides(
                "num_experts",
                ("args.size",),
                "{world.num_experts} experts are not divisible by ep={args.size}",
                fix=(ms.Fix.give_field("ep", note="a divisor of {world.num_experts}"),),
            ),
            ms.Condition.divides(
                "world_size",
                ("tp", "args.size", "pp"),
                "world size {world.world_size} is not a multiple of tp x ep x pp = {world.tp} x {args.size} x {world.pp}",
                fix=(
                    ms.Fix.give_field("ep", note="so that tp x ep x pp divides {world.world_size}"),
                    ms.Fix.give_setting("expert_tensor_size", 1),
                ),
                when=_follows_tensor_size,
            ),
            ranks_hold_experts_of_given_size,
            bytes_are_known,
            flex_has_other_ranks,
            ms.RequiresAny(
                "deepspeed-moe",
                reason="linear layers have biases, and tensor-parallel ranks share experts with biases only in its layers",
                when=_splits_biased_experts,
                fix=(ms.Fix.give_field("linear_bias", False), ms.Fix.give_setting("expert_tensor_size", 1)),
            ),
            ms.Requires(
                "sequence-parallel",
                reason="Megatron trains MoE layers with tp > 1 only with sequence parallelism",
                when=has_tensor_ranks,
            ),
        ),
        megatron_flags=(
            ms.MegatronFlag("expert_tensor_parallel_size", "expert_tensor_size"),
            ms.MegatronFlag("moe_token_dispatcher_type", "dispatcher", follows_default=True),
        ),
        numerics=ms.Numerics.reordered(reason="expert gradients are summed over the tokens of several ranks"),
        state=ms.CheckpointState(
            "resharded",
            "the optimizer state of distributed experts is separate, and another number of ranks can load it",
            added="refused",
            removed="refused",
            settings={"dispatcher": "safe"},
        ),
        own_trainer="from mindspeed.nn import MoE",
    )

    @ms.hookimpl
    def notes(self) -> Iterable[str]:
        return describe_choice(self.args, self.world)

    @ms.hookimpl
    def job_values(self) -> Mapping[str, Any]:
        size = self.args.expert_tensor_size
        return {"dispatcher": self._dispatcher()} | ({} if size is None else {"expert_tensor_size": size})

    def _dispatcher(self) -> str:
        chosen = self.args.dispatcher
        return cheaper_dispatcher(self.args, self.world) if chosen == "auto" else chosen

    @ms.hookimpl
    def megatron_args(self) -> list[ms.ArgOverride]:
        overrides = [
            ms.ArgOverride(
                "expert_model_parallel_size",
                self.args.size,
                "expert-parallel.size sets the number of ranks that share the experts",
            ),
            ms.ArgOverride(
                "moe_token_dispatcher_type",
                self._dispatcher(),
                "expert-parallel.dispatcher selects the collective that sends tokens to experts",
            ),
        ]
        if self.args.expert_tensor_size is not None:
            size = self.args.expert_tensor_size
            overrides.append(
                ms.ArgOverride(
                    "expert_tensor_parallel_size",
                    size,
                    "expert-parallel.expert_tensor_size sets the number of ranks that split each expert",
                )
            )
        return overrides
