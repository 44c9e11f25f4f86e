"""Experts of a MoE layer spread over ranks."""

from __future__ import annotations

from typing import Literal

from mindspeed.features.expert_parallel.choice import NEEDED, cheaper_dispatcher, describe_choice
from mindspeed.plugins import (
    ArgOverride,
    Category,
    Check,
    CheckpointState,
    Feature,
    FeatureArgs,
    FeatureSpec,
    Field,
    GiveField,
    GiveSetting,
    MegatronFlag,
    Numerics,
    Requires,
    hookimpl,
)


class ExpertParallelArgs(FeatureArgs):
    size: int = Field(1, ge=1, description="ranks over which the experts of a layer are spread")
    dispatcher: Literal["alltoall", "allgather", "auto"] = Field(
        "alltoall", description="how tokens travel to their experts; auto takes the one that sends fewer bytes"
    )
    expert_tensor_size: int | None = Field(
        None, ge=1, description="ranks that share one expert; as tensor-parallel if not given"
    )


class ExpertParallel(Feature[ExpertParallelArgs]):
    """Each rank holds some of the experts; tokens travel to the ranks of their experts and back."""

    spec = FeatureSpec(
        name="expert-parallel",
        summary="Experts of MoE layers spread over ranks, tokens sent to them and back",
        category=Category.MEGATRON,
        level=0,
        sizes={"ep": "size"},
        constraints=(
            Check(
                lambda args, world: world.num_experts > 0,
                "there are no experts to spread, the model is dense",
                fix="--num-experts with a multiple of {args.size}, or remove expert-parallel",
            ),
            Check(
                lambda args, world: world.num_experts % args.size == 0,
                "{world.num_experts} experts cannot be spread evenly over {args.size} ranks",
                fix=(GiveField("ep", note="a divisor of {world.num_experts}"),),
            ),
            Check(
                lambda args, world: world.world_size % (world.tp * args.size * world.pp) == 0,
                "world size {world.world_size} is not a multiple of tp x ep x pp = {world.tp} x {args.size} x {world.pp}",
                fix=(GiveField("ep", note="a smaller one"), GiveSetting("expert_tensor_size", 1)),
                when=lambda args, world: args.expert_tensor_size is None,
            ),
            Check(
                lambda args, world: world.world_size % (args.expert_tensor_size * args.size * world.pp) == 0,
                "world size {world.world_size} is not a multiple of expert tensor size x ep x pp = "
                "{args.expert_tensor_size} x {args.size} x {world.pp}",
                fix=(GiveField("ep", note="a smaller one"), GiveSetting("expert_tensor_size", note="a smaller one")),
                when=lambda args, world: args.expert_tensor_size is not None,
            ),
            Check(
                lambda args, world: all(world.knows(name) for name in NEEDED),
                "the dispatcher is auto, which compares bytes, and these follow from "
                f"{', '.join(NEEDED)}, of which some are not known",
                fix="give all of them, or --set expert-parallel.dispatcher=alltoall",
                when=lambda args, world: args.dispatcher == "auto",
            ),
            Check(
                lambda args, world: (args.expert_tensor_size or world.tp) == 1,
                "linear layers have biases, and an expert with biases cannot be split over tensor-parallel ranks",
                fix="--no-linear-bias (Megatron-LM: --disable-bias-linear), or --set expert-parallel.expert_tensor_size=1",
                when=lambda args, world: world.tp > 1 and world.linear_bias,
            ),
            Requires(
                "sequence-parallel",
                reason="Megatron trains MoE layers under tensor parallelism only with sequence parallelism",
                when=lambda args, world: world.tp > 1,
            ),
        ),
        megatron_flags=(
            MegatronFlag("expert_tensor_parallel_size", "expert_tensor_size"),
            MegatronFlag("moe_token_dispatcher_type", "dispatcher", follows_default=True),
        ),
        numerics=Numerics.reordered(reason="gradients of an expert are sums over the tokens of several ranks"),
        notes=describe_choice,
        state=CheckpointState(
            "resharded",
            "Megatron keeps an optimizer of its own for experts that are spread, whose state another number of ranks can load",
            added="refused",
            removed="refused",
            settings={"dispatcher": "safe"},
        ),
    )

    @hookimpl
    def megatron_args(self) -> list[ArgOverride]:
        chosen = self.args.dispatcher
        dispatcher = cheaper_dispatcher(self.args, self.world) if chosen == "auto" else chosen
        overrides = [
            ArgOverride("expert_model_parallel_size", self.args.size, "expert-parallel.size"),
            ArgOverride("moe_token_dispatcher_type", dispatcher, "expert-parallel.dispatcher"),
        ]
        if self.args.expert_tensor_size is not None:
            size = self.args.expert_tensor_size
            overrides.append(ArgOverride("expert_tensor_parallel_size", size, "expert-parallel.expert_tensor_size"))
        return overrides
