"""Capacity-gated experts: DeepSpeed's MoE layer in Megatron models."""

from __future__ import annotations

from typing import Any

from mindspeed.features.deepspeed_moe.settings import DeepspeedMoeArgs, describe_masks, group_tokens, shares
from mindspeed.moe.feature import is_set, unserved
from mindspeed.plugins import (
    ArgOverride,
    Category,
    Check,
    CheckpointState,
    Conflicts,
    Feature,
    FeatureSpec,
    MindSpeedError,
    Numerics,
    Problem,
    Requires,
    Slot,
    VerifyWith,
    hookimpl,
)

_OWN_TRANSFERS = "the layer has transfers of its own, of equal size on every rank"
_DISPATCHERS = ("moe-allgather-dispatcher", "moe-alltoall-dispatcher", "moe-zero-memory", "moe-tp-extend-ep")


class DeepspeedMoe(Feature[DeepspeedMoeArgs]):
    """The router chooses experts with a capacity, all ranks exchange tables of one size."""

    spec = FeatureSpec(
        name="deepspeed-moe",
        summary="Experts with a fixed number of places, second choices behind first ones, transfers of equal size",
        category=Category.DEEPSPEED_MOE,
        slots={Slot.MOE_LAYER},
        megatron=">=0.14,<0.17",
        constraints=(
            Check(
                lambda args, world: world.num_experts > 0,
                "there are no experts to choose from, the model is dense",
                fix="--num-experts N, or remove deepspeed-moe",
            ),
            Check(
                lambda args, world: not world.knows("router_topk") or world.router_topk <= world.num_experts,
                "a token has {world.router_topk} experts, and there are {world.num_experts}",
                fix="use a --router-topk of at most {world.num_experts}",
                when=lambda args, world: world.num_experts > 0,
            ),
            Check(
                lambda args, world: not is_set(world, "expert_capacity_factor"),
                "expert_capacity_factor is {world.expert_capacity_factor}, Megatron's own capacity",
                fix="--expert-capacity-factor 0, and --set deepspeed-moe.capacity_factor",
            ),
            *unserved("deepspeed-moe"),
            Check(
                lambda args, world: args.groups % shares(world) == 0,
                "{args.groups} groups of tokens cannot be spread over the {world.tp} x {world.cp} ranks of tp and cp",
                fix="use a multiple of tp x cp for deepspeed-moe.groups",
                when=lambda args, world: args.groups is not None,
            ),
            Check(
                lambda args, world: world.seq_length * world.micro_batch_size % args.groups == 0,
                "{args.groups} groups cannot be made of {world.seq_length} x {world.micro_batch_size} tokens of a micro-batch",
                fix="use a divisor of the tokens for deepspeed-moe.groups",
                when=lambda args, world: args.groups is not None,
            ),
            Check(
                lambda args, world: args.min_capacity <= group_tokens(args, world),
                "min_capacity={args.min_capacity} is more than the tokens of a group, "
                "and {world.seq_length} x {world.micro_batch_size} tokens of a micro-batch make all groups",
                fix="--set deepspeed-moe.min_capacity=1, or fewer groups",
            ),
            Check(
                lambda args, world: args.interval <= world.num_layers,
                "every {args.interval}th layer has experts, and the model has {world.num_layers} layers",
                fix="--set deepspeed-moe.interval=1, or more layers",
                when=lambda args, world: args.interval > 1,
            ),
            Check(
                lambda args, world: world.ep * world.tp == 1,
                "the reference runs every expert on every token of a rank, and experts are spread over "
                "ep x tp = {world.ep} x {world.tp} ranks",
                fix="drop deepspeed-moe.reference",
                when=lambda args, world: args.reference,
            ),
            Requires(
                "sequence-parallel",
                reason="Megatron trains MoE layers under tensor parallelism only with sequence parallelism",
                when=lambda args, world: world.tp > 1,
            ),
            *(Conflicts(name, reason=_OWN_TRANSFERS) for name in (Slot.MOE_DISPATCHER, *_DISPATCHERS)),
            Conflicts("moe-token-permute", reason="dispatchers call its operators, and the layer has none"),
        ),
        numerics=Numerics.reordered(
            reason="against its formula, every expert on every token with the gate's weights (deepspeed-moe.reference); "
            "against Megatron's gate it is another model wherever tokens are dropped"
        ),
        state=CheckpointState(
            "own",
            "the groups of a run decide which tokens are kept",
            added="safe",
            removed="safe",
            changed="safe",
            settings={"groups": "refused"},
        ),
        reference={"reference": True},
        notes=lambda args, world: describe_masks(args, world) if world.num_experts and not args.reference else [],
        verify_with=VerifyWith(world={"ep": 2}),
    )

    @hookimpl
    def megatron_args(self) -> list[ArgOverride]:
        interval = self.args.interval
        if interval == 1:
            return []
        layers = tuple(int(number % interval == 0) for number in range(1, self.world.num_layers + 1))
        return [ArgOverride("moe_layer_freq", layers, "deepspeed-moe.interval, which counts layers from 1")]

    @hookimpl
    def config_ready(self, config: Any) -> None:
        if not config.num_moe_experts:
            return
        from mindspeed.features.deepspeed_moe.limits import misfits

        wrong = misfits(config, self.args.noise.lower() == "rsample", self.args.random_priority)
        if wrong:
            name = self.spec.name
            raise MindSpeedError([Problem("MS304", f"{name}: {text}", (name,), fix=fix) for text, fix in wrong.items()])

    @hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        from mindspeed.features.deepspeed_moe.spec import with_capacity

        return with_capacity(spec, self.args) if config.num_moe_experts else spec

    @hookimpl
    def save_extra(self, state: Any) -> dict[str, Any]:
        return {"groups": self.args.groups or shares(self.world)}

    @hookimpl
    def load_extra(self, state: Any, data: dict[str, Any]) -> None:
        here, before = self.args.groups or shares(self.world), data["groups"]
        if here != before:
            text = f"deepspeed-moe: the run had {before} groups of tokens in a micro-batch, and would go on with {here}"
            fix = f"--set deepspeed-moe.groups={before}"
            raise MindSpeedError([Problem("MS304", text, ("deepspeed-moe",), fix=fix)])
