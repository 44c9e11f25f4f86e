"""Conditions of the gate: what Megatron's router has and the gate has not, and settings that fit the tokens. Light."""

from __future__ import annotations

from typing import Any, Final

from mindspeed import plugins as ms
from mindspeed.features.deepspeed_moe.settings import DeepspeedMoeArgs, group_tokens, shares
from mindspeed.moe.conditions import DISPATCHER_CONDITIONS, NO_FORCED_BALANCING, is_sparse
from mindspeed.plugins.shared_conditions import NO_TRANSFORMER_ENGINE_LAYERS, has_experts

_REMOVE: Final = ms.Fix.remove_feature()


def has_tensor_ranks(args: Any, world: ms.World) -> bool:
    """Return whether there are several tensor-parallel ranks."""
    return world.tp > 1


def shares_biases(args: Any, world: ms.World) -> bool:
    """Return whether tensor-parallel ranks share experts with biases."""
    size = world.expert_tensor_size if world.knows("expert_tensor_size") else world.tp
    return bool(size > 1 and world.linear_bias)


@ms.condition(
    "grouped experts have biases, which tensor-parallel ranks share only with single experts",
    fix=(ms.Fix.give_field("grouped_experts", False), ms.Fix.give_field("linear_bias", False)),
    when=shares_biases,
)
def experts_with_shared_biases_are_single(args: DeepspeedMoeArgs, world: ms.World) -> bool:
    """Check that experts with biases that tensor-parallel ranks share are single modules."""
    return not world.grouped_experts


def has_expert_ranks(args: Any, world: ms.World) -> bool:
    """Return whether experts are distributed over ranks."""
    return world.ep > 1


def _has_groups(args: DeepspeedMoeArgs, world: ms.World) -> bool:
    """Return whether a number of groups is given."""
    return args.groups is not None


def _has_dense_layers(args: DeepspeedMoeArgs, world: ms.World) -> bool:
    """Return whether only every Nth layer has experts."""
    return args.interval > 1


def _is_reference(args: DeepspeedMoeArgs, world: ms.World) -> bool:
    """Return whether the reference formula is used."""
    return args.reference


def _chooses_one_expert(args: DeepspeedMoeArgs, world: ms.World) -> bool:
    """Return whether a setting acts only with one expert per token."""
    return args.random_priority or args.noise == "rsample"


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
    when=_has_dense_layers,
)
def model_has_expert_layers(args: DeepspeedMoeArgs, world: ms.World) -> bool:
    """Check that a layer with experts exists."""
    return bool(args.interval <= world.num_layers)


@ms.condition(
    "reference=true needs every expert on one rank, but experts are distributed over ep x tp = {world.ep} x {world.tp} ranks",
    fix=(ms.Fix.drop_setting("reference"),),
    when=_is_reference,
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
    experts_with_shared_biases_are_single,
    ms.Condition.unset(
        "expert_capacity_factor",
        "Megatron limits the tokens per expert (expert_capacity_factor={world.expert_capacity_factor}), but {feature} sets a "
        "separate capacity",
        fix=(
            ms.Fix.together(
                (
                    ms.Fix.give_field("expert_capacity_factor", 0),
                    ms.Fix.give_setting("capacity_factor", "{world.expert_capacity_factor}"),
                )
            ),
        ),
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
        "noise=rsample and random_priority act only where a token has one expert, but router_topk is {world.router_topk}",
        when=_chooses_one_expert,
        otherwise="idle",
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
