"""Capacity-gated experts: DeepSpeed's MoE layer in Megatron models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Literal

from pydantic import field_validator

from mindspeed import plugins as ms
from mindspeed.moe.capacity import capacity_of
from mindspeed.moe.conditions import DISPATCHER_CONDITIONS, NO_FORCED_BALANCING, is_sparse
from mindspeed.plugins.shared_conditions import NO_TRANSFORMER_ENGINE_LAYERS, has_experts

_REMOVE: Final = ms.Fix.remove_feature()


def has_tensor_ranks(args: Any, world: ms.World) -> bool:
    """Return whether there are several tensor-parallel ranks."""
    return world.tp > 1


def _has_groups(args: DeepspeedMoeArgs, world: ms.World) -> bool:
    """Return whether a number of groups is given."""
    return args.groups is not None


def _without(field: str, sentence: str, fix: ms.Fixes) -> ms.Condition:
    return ms.Condition.unset(field, f"{sentence}, which {{feature}} does not support", (*fix, _REMOVE))


@ms.condition(
    "router_topk={world.router_topk} is greater than the number of experts, {world.num_experts}",
    fix=(ms.Fix.give_field("router_topk", note="at most {world.num_experts}"),),
    when=is_sparse,
)
def tokens_have_enough_experts(args: DeepspeedMoeArgs, world: ms.World) -> bool:
    """Check that a token chooses among at least as many experts as it gets."""
    return not world.knows("router_topk") or bool(world.router_topk <= world.num_experts)


@ms.condition(
    "groups={args.groups} is not divisible by tp x cp = {world.tp} x {world.cp}",
    fix=(ms.Fix.give_setting("groups", note="a multiple of {world.tp} x {world.cp}"),),
    when=_has_groups,
)
def ranks_share_groups(args: DeepspeedMoeArgs, world: ms.World) -> bool:
    """Check that every rank that shares a micro-batch has equally many groups."""
    return bool((args.groups or 1) % shares(world) == 0)


@ms.condition(
    "groups={args.groups} does not divide the {world.seq_length} x {world.micro_batch_size} tokens of a micro-batch",
    fix=(ms.Fix.give_setting("groups", note="a divisor of the number of tokens"),),
    when=_has_groups,
)
def groups_divide_tokens(args: DeepspeedMoeArgs, world: ms.World) -> bool:
    """Check that groups are of equal size."""
    return bool(world.seq_length * world.micro_batch_size % (args.groups or 1) == 0)


@ms.condition(
    "the {world.seq_length} x {world.micro_batch_size} tokens of a micro-batch (sequence length x micro-batch size) are "
    "split into groups of fewer than min_capacity={args.min_capacity} tokens",
    fix=(ms.Fix.give_setting("min_capacity", 1), ms.Fix.give_setting("groups", note="fewer, larger groups")),
)
def groups_have_tokens(args: DeepspeedMoeArgs, world: ms.World) -> bool:
    """Check that a group has as many tokens as an expert has places at least."""
    return args.min_capacity <= group_tokens(args, world)


@ms.condition(
    "interval={args.interval} is greater than num_layers={world.num_layers}, so no layer would have experts",
    fix=(ms.Fix.give_setting("interval", 1), ms.Fix.give_field("num_layers", note="at least {args.interval}")),
    when=lambda args, world: args.interval > 1,
)
def model_has_expert_layers(args: DeepspeedMoeArgs, world: ms.World) -> bool:
    """Check that a layer with experts exists."""
    return bool(args.interval <= world.num_layers)


@ms.condition(
    "reference=true needs every expert on one rank, but experts are distributed over ep x tp = {world.ep} x {world.tp} ranks",
    fix=(ms.Fix.drop_setting("reference"),),
    when=lambda args, world: args.reference,
)
def reference_has_all_experts(args: DeepspeedMoeArgs, world: ms.World) -> bool:
    """Check that the formula has every expert on its rank."""
    return world.ep * world.tp == 1


@ms.condition(
    "the router balances experts by {world.router_balancing[0]}, but {feature} supports only aux_loss and none",
    fix=(ms.Fix.give_field("router_balancing", "aux_loss"), _REMOVE),
)
def balancing_is_known(args: DeepspeedMoeArgs, world: ms.World) -> bool:
    """Check that experts are balanced by a loss that the gate has, or not at all."""
    return world.router_balancing in (("aux_loss",), ("none",))


@ms.condition(
    "Megatron's dispatcher is flex, but {feature} exchanges tokens itself, and supports only the dispatchers alltoall and "
    "allgather",
    fix=(ms.Fix.give_setting("expert-parallel.dispatcher", "alltoall"), _REMOVE),
)
def dispatcher_is_not_flex(args: DeepspeedMoeArgs, world: ms.World) -> bool:
    """Check that Megatron's dispatcher has the groups that the layer reads."""
    return not world.knows("dispatcher") or world.dispatcher != "flex"


@ms.condition(
    "expert_tensor_size is 1 without expert parallelism, so each of the tp={world.tp} ranks would train a separate copy "
    "of every expert",
    fix=(ms.Fix.give_field("ep", note="a multiple of {world.tp}"), ms.Fix.drop_setting("expert-parallel.expert_tensor_size")),
    when=has_tensor_ranks,
)
def experts_have_no_copies(args: DeepspeedMoeArgs, world: ms.World) -> bool:
    """Check that tensor-parallel ranks do not train copies of whole experts."""
    return not (world.ep == 1 and world.knows("expert_tensor_size") and world.expert_tensor_size == 1)


CONDITIONS: Final[tuple[ms.Condition, ...]] = (
    has_experts,
    tokens_have_enough_experts,
    ms.Condition.unset(
        "expert_capacity_factor",
        "Megatron limits the tokens per expert (expert_capacity_factor={world.expert_capacity_factor}), but {feature} sets a "
        "separate capacity",
        fix=(ms.Fix.together((ms.Fix.give_field("expert_capacity_factor", 0), ms.Fix.give_setting("capacity_factor"))),),
    ),
    *DISPATCHER_CONDITIONS,
    NO_TRANSFORMER_ENGINE_LAYERS,
    ranks_share_groups,
    groups_divide_tokens,
    groups_have_tokens,
    model_has_expert_layers,
    reference_has_all_experts,
    ms.Condition.equals(
        "router_topk",
        1,
        "noise=rsample and random_priority support only one expert per token, but router_topk is {world.router_topk}",
        fix=(
            ms.Fix.together((ms.Fix.drop_setting("noise"), ms.Fix.drop_setting("random_priority"))),
            ms.Fix.give_field("router_topk", 1),
        ),
        when=lambda args, world: args.random_priority or args.noise == "rsample",
    ),
    ms.Condition.equals(
        "router_score", "softmax", "router scores are {world.router_score}, but {feature} supports only softmax"
    ),
    balancing_is_known,
    dispatcher_is_not_flex,
    experts_have_no_copies,
    NO_FORCED_BALANCING,
    _without(
        "router_groups",
        "the router selects experts from {world.router_groups} groups",
        (ms.Fix.give_field("router_groups", 0),),
    ),
    _without(
        "router_bias",
        "the router balances experts by biases",
        (ms.Fix.give_field("router_bias", False),),
    ),
    _without(
        "router_scaling",
        "the router scales probabilities by {world.router_scaling}",
        (ms.Fix.give_field("router_scaling", 0, note="no scaling"),),
    ),
    _without(
        "probabilities_on_input",
        "routing probabilities scale the input of experts",
        (ms.Fix.give_field("probabilities_on_input", False),),
    ),
    _without(
        "shared_expert_overlap",
        "Megatron's dispatcher overlaps shared experts with its transfers",
        (ms.Fix.give_field("shared_expert_overlap", False), ms.Fix.give_setting("moe-shared-experts.overlap", False)),
    ),
)


class DeepspeedMoeArgs(ms.FeatureArgs):
    capacity_factor: float = ms.Field(
        1.0,
        gt=0,
        description="Capacity of an expert, as a multiple of its balanced share of the tokens. Tokens above the "
        "capacity are dropped",
    )
    eval_capacity_factor: float | None = ms.Field(
        None, gt=0, description="Capacity factor in evaluation (default: capacity_factor)"
    )
    min_capacity: int = ms.Field(
        4,
        ge=1,
        description="Minimum capacity: every expert accepts at least this number of tokens of each group (setting groups)",
    )
    noise: Literal["none", "jitter", "rsample"] = ms.Field(
        "none",
        description="Noise of the router in training. jitter = multiply the router's input by random factors near 1. "
        "rsample = add Gumbel noise to the router's logits (top-1 only). DeepSpeed's names Jitter and RSample also work",
    )
    random_priority: bool = ms.Field(
        False, description="In training with one expert per token: fill expert capacity in random order instead of token order"
    )
    sinkhorn: bool = ms.Field(
        False,
        description="Balance the router's logits by Sinkhorn iterations before experts are chosen. Expert outputs "
        "are still weighted by the original scores",
    )
    groups: int | None = ms.Field(
        None,
        ge=1,
        description="Number of groups of consecutive tokens in a micro-batch, each with a separate expert capacity (default: "
        "one per tensor- and context-parallel rank)",
    )
    interval: int = ms.Field(
        1,
        ge=1,
        description="Distance between MoE layers: with N, layers N, 2N, 3N ... have experts and the others are dense (layers "
        "count from 1)",
    )
    reference: bool = ms.Field(
        False,
        description="For verification only: run every expert on every token, in one process. mindspeed features verify uses "
        "it as the baseline",
    )

    @field_validator("noise", mode="before")
    @classmethod
    def _in_lower_case(cls, value: object) -> object:
        return value.lower() if isinstance(value, str) else value


def shares(world: ms.World) -> int:
    """Count the ranks that share the tokens of a micro-batch."""
    return int(world.tp * world.cp)


def group_tokens(args: DeepspeedMoeArgs, world: ms.World) -> int:
    """Count the tokens of one group."""
    return int(world.seq_length * world.micro_batch_size // (args.groups or shares(world)))


def describe_masks(args: DeepspeedMoeArgs, world: ms.World) -> list[str]:
    """Return the bytes that the masks of dispatch and combination keep, and what does without them."""
    tokens = group_tokens(args, world)
    capacity = capacity_of(tokens, world.num_experts, world.router_topk, args.capacity_factor, args.min_capacity)
    everything = world.seq_length * world.micro_batch_size // shares(world)
    kept = mask_bytes(everything, world.num_experts, capacity, 4 if world.dtype == "fp32" else 2)
    return [
        (
            f"masks of {everything:,} tokens x {world.num_experts} experts x {capacity} slots keep {kept:,} bytes per layer "
            "and micro-batch; deepspeed-moe-rearrange avoids these masks"
        )
    ]


def mask_bytes(tokens: int, experts: int, capacity: int, value: int) -> int:
    """Bytes that the masks of dispatch and combination keep for backward, of values of ``value`` bytes."""
    return 2 * tokens * experts * capacity * value


_OWN_TRANSFERS = (
    "deepspeed-moe exchanges tokens itself and never calls Megatron's token dispatcher, so features that change or use this "
    "dispatcher would have no effect"
)
_DISPATCHERS = ("moe-allgather-dispatcher", "moe-alltoall-dispatcher", "moe-zero-memory", "moe-tp-extend-ep")


class DeepspeedMoe(ms.Feature[DeepspeedMoeArgs]):
    """Give experts a fixed capacity, as DeepSpeed does.

    Each expert accepts a fixed number of tokens and drops the rest, so all-to-alls have equal sizes on all ranks.
    The first choices of all tokens take places in the experts before any second choice does.
    """

    spec = ms.FeatureSpec(
        name="deepspeed-moe",
        category=ms.Category.DEEPSPEED_MOE,
        slots={ms.Slot.MOE_LAYER},
        megatron=">=0.14,<0.17",
        constraints=(
            *CONDITIONS,
            ms.Requires(
                "sequence-parallel",
                reason="Megatron trains MoE layers with tp > 1 only with sequence parallelism",
                when=has_tensor_ranks,
            ),
            *(ms.Conflicts(name, reason=_OWN_TRANSFERS) for name in (ms.Slot.MOE_DISPATCHER, *_DISPATCHERS)),
            ms.Conflicts(
                "dynamic-shapes",
                reason="all ranks must exchange equal numbers of tokens, but with dynamic-shapes their micro-batches have "
                "different lengths",
                when=lambda args, world: world.ep > 1,
            ),
            ms.Conflicts(
                "moe-token-permute",
                reason="moe-token-permute changes Megatron's dispatcher, which deepspeed-moe does not use",
            ),
        ),
        numerics=ms.Numerics.reordered(
            reason="the baseline is a run with deepspeed-moe.reference=true, which drops the same tokens. "
            "Compared with that run, the summation order differs. Megatron's MoE layer is no baseline, because it keeps the "
            "tokens that deepspeed-moe drops"
        ),
        state=ms.CheckpointState(
            "own",
            "the number of groups decides which tokens are dropped",
            added="safe",
            removed="safe",
            changed="safe",
            settings={"groups": "refused"},
        ),
        reference={"reference": True},
        verify_with=ms.VerifyWith(settings={"deepspeed-moe": {"groups": 4}}, world={"ep": 2}),
    )

    @ms.hookimpl
    def notes(self) -> Iterable[str]:
        return describe_masks(self.args, self.world) if self.world.num_experts and not self.args.reference else ()

    @ms.hookimpl
    def megatron_args(self) -> list[ms.ArgOverride]:
        interval = self.args.interval
        if interval == 1:
            return []
        layers = tuple(int(number % interval == 0) for number in range(1, self.world.num_layers + 1))
        return [
            ms.ArgOverride(
                "moe_layer_freq",
                layers,
                "deepspeed-moe.interval selects the layers with experts: 1 = a layer with experts, 0 = a dense layer",
            )
        ]

    @ms.hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        from mindspeed.features.deepspeed_moe.layers import with_capacity

        return with_capacity(spec, self.args)

    @ms.hookimpl
    def save_extra(self, state: Any) -> dict[str, Any]:
        return {"groups": self.args.groups or shares(self.world)}

    @ms.hookimpl
    def load_extra(self, state: Any, data: dict[str, Any]) -> None:
        here, before = self.args.groups or shares(self.world), data["groups"]
        if here != before:
            text = (
                f"deepspeed-moe: the checkpoint was trained with {before} groups of tokens per micro-batch, but this "
                f"run has {here}"
            )
            raise ms.MindSpeedError(
                [ms.Problem("MS304", text, ("deepspeed-moe",), fix=ms.Fix.give_setting("deepspeed-moe.groups", before))]
            )
