"""Ulysses attention in Megatron."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from mindspeed import plugins as ms
from mindspeed.context_parallel.conditions import KeepArgs, interval_is_inside, predicts_one_token
from mindspeed.context_parallel.costs import (
    Attention,
    Keep,
    attention_of,
    compact_inputs,
    cost_of_waiting,
    head_all_to_all,
    ulysses,
    with_heads_exchanged,
)
from mindspeed.context_parallel.feature import ALGORITHM, AlgorithmFeature, any_length, packed_in, sliced_by
from mindspeed.plugins.saved_tensors import SavedTensors

if TYPE_CHECKING:
    from mindspeed.context_parallel.core_attention import CoreAttention

_LAYERS = "mindspeed.features.ulysses_attention.layers"
_REASON = "one contiguous chunk of the sequence, where Megatron gives it an early and a late chunk"


class UlyssesAttentionArgs(KeepArgs):
    keep: Literal["none", "half", "full"] = ms.Field(
        "none",
        description="Store keys (half) or keys and values (full) for backward before the all-to-all, where they are smaller, "
        "and repeat their all-to-all in backward. none = store them after the all-to-all: more memory, fewer transfers",
    )
    kv_allgather: bool = ms.Field(
        False,
        description="For a model with a single key/value head: all-gather keys and values (true), instead of sending a copy "
        "to each rank by all-to-all (false)",
    )


def _keeps(args: UlyssesAttentionArgs, world: ms.World) -> bool:
    """Return whether backward exchanges keys again."""
    return args.keep != "none"


@ms.condition(
    "keep={args.keep} stores keys as they are before the all-to-all. This saves memory only if the all-to-all copies key heads "
    "to several ranks. Here it copies none: cp x tp = {world.cp} x {world.tp} divides the {world.num_query_groups} key heads",
    fix=(ms.Fix.give_setting("keep", "none"),),
    when=_keeps,
)
def key_heads_are_sent_twice(args: UlyssesAttentionArgs, world: ms.World) -> bool:
    """Check that a key head is sent to several ranks; otherwise keeping it saves no memory."""
    return bool(world.num_query_groups // world.tp % world.cp != 0)


def _gathers(args: UlyssesAttentionArgs, world: ms.World) -> bool:
    """Return whether keys and values are gathered."""
    return args.kv_allgather


@ms.condition(
    "kv_allgather supports one key head per tensor-parallel rank, but the model has {world.num_query_groups} key heads for "
    "tp={world.tp} ranks",
    fix=(
        ms.Fix.give_setting("kv_allgather", False),
        ms.Fix.advise("use kv-allgather-cp, which gathers any number of key heads"),
    ),
    when=_gathers,
)
def one_key_head_is_gathered(args: UlyssesAttentionArgs, world: ms.World) -> bool:
    """Check that a tensor-parallel rank has a single key head."""
    return bool(world.num_query_groups <= world.tp)


def own_instead_of_fetched(a: Attention, world: ms.World, keep: Keep) -> int:
    """Return the bytes that Ulysses attention keeps more, or fewer, with own keys and values in place of fetched ones."""
    fetched = head_all_to_all(a, world.cp).named(keep) * a.element
    own = a.named(keep) * a.element
    if keep != "none" and not world.is_set("multi_latent_attention"):  # views keep the product of all three
        product = compact_inputs(a)
        keys = a.named("half") * a.element
        own = product if not world.rotary else keys + (product if keep == "full" else 0)
    return own - fetched


class UlyssesAttention(AlgorithmFeature[UlyssesAttentionArgs]):
    """Exchange tokens for heads around attention.

    An all-to-all before attention gives every rank the whole sequence for some of the heads. Another all-to-all after
    attention restores the split sequence.
    """

    spec = ms.FeatureSpec(
        name="ulysses-attention",
        category=ms.Category.CONTEXT_PARALLEL,
        slots={ms.Slot.CONTEXT_PARALLEL},
        provides={ms.Capability.DOCUMENTS, ms.Capability.POSITION_BIAS},
        constraints=(
            *ALGORITHM,
            predicts_one_token,
            ms.Condition.divides(
                "num_attention_heads",
                ("cp", "tp"),
                "{world.num_attention_heads} attention heads are not divisible by cp x tp = {world.cp} x {world.tp}",
                fix=(
                    ms.Fix.give_field("cp", note="so that cp x tp divides the number of heads"),
                    ms.Fix.advise("use ring-attention, which does not split heads"),
                ),
            ),
            key_heads_are_sent_twice,
            interval_is_inside,
            one_key_head_is_gathered,
        ),
        megatron_flags=(ms.MegatronFlag("cp_comm_type", switch="on", values=("a2a",), size="cp"),),
        numerics=ms.Numerics.reordered(
            reason="each rank sums weight gradients over its part of the sequence, and the sums are added over ranks"
        ),
        own_trainer='from mindspeed.nn import ContextParallelAttention  # algorithm="ulysses"',
    )

    def core_attention(self) -> type[CoreAttention]:
        from mindspeed.features.ulysses_attention.layers import UlyssesCoreAttention

        return UlyssesCoreAttention

    def slicing(self) -> list[ms.Patch]:
        return [
            *sliced_by(f"{_LAYERS}:share_of_batch", f"{_LAYERS}:share_of_table", _REASON),
            *packed_in(_LAYERS),
            any_length(),
        ]

    @ms.hookimpl
    def cost(self) -> ms.Cost:
        return cost_of_waiting(ulysses(attention_of(self.world), self.world.cp, self.args.keep), self.world)

    def kept(self, tensors: SavedTensors, a: Attention) -> SavedTensors:
        own = own_instead_of_fetched(a, self.world, self.args.keep)
        return with_heads_exchanged(tensors, a, self.world.cp, own, self.args.interval)
