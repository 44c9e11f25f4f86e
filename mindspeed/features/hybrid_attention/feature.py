"""Hybrid attention in Megatron."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import gcd
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from mindspeed import plugins as ms
from mindspeed.context_parallel.communicators import communicators_of_ring
from mindspeed.context_parallel.conditions import (
    KeepArgs,
    degree_splits_heads,
    degree_splits_ranks,
    interval_is_inside,
    predicts_one_token,
    two_chunks_for_each_rank,
)
from mindspeed.context_parallel.costs import (
    Attention,
    attention_of,
    between,
    blocks_of_ring,
    cost,
    head_all_to_all,
    near,
    ring,
    ulysses,
    with_heads_exchanged,
)
from mindspeed.context_parallel.feature import ALGORITHM, TwoLevelFeature, packed_in, sliced_by
from mindspeed.plugins.saved_tensors import SavedTensors

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from mindspeed.context_parallel.core_attention import CoreAttention

_LAYERS = "mindspeed.features.hybrid_attention.layers"
_REASON = "its part of the sequence, which is split over the ring first and then over the Ulysses ranks"


class HybridAttentionArgs(KeepArgs):
    ulysses_degree: int | None = ms.Field(
        None,
        ge=2,
        description="Number of neighbouring ranks that exchange tokens for attention heads by all-to-all (Ulysses). Best: "
        "the number of ranks of a node. Required",
    )
    window: int = ms.Field(
        1, ge=1, description="Number of ring ranks in an inner ring, such as those of a node; 1 = one ring of all ring ranks"
    )
    keep: Literal["none", "half", "full"] = ms.Field(
        "none",
        description="Received blocks that are kept for backward: none (all are received again), half (keys are kept) or full "
        "(keys and values). Keeping blocks saves transfers but uses memory",
    )


def _some_degree_splits(args: HybridAttentionArgs, world: ms.World) -> bool:
    """Return whether there is a number of neighbours that could be given."""
    return any(world.cp % degree == 0 for degree in range(2, world.cp))


@ms.condition(
    "ulysses_degree, the number of ranks that exchange tokens for heads, is not set",
    fix=(ms.Fix.give_setting("ulysses_degree", note="ideally the number of ranks of a node"),),
    when=_some_degree_splits,
)
def degree_is_given(args: HybridAttentionArgs, world: ms.World) -> bool:
    """Check that the number of neighbours is given."""
    return args.ulysses_degree is not None


@ms.condition(
    "no ulysses_degree splits cp={world.cp} into two or more groups of two or more ranks",
    fix=(ms.Fix.give_field("cp", 4, "or a larger product of two numbers"),),
)
def some_degree_splits_ranks(args: HybridAttentionArgs, world: ms.World) -> bool:
    """Check that ranks can be split, where the number of neighbours is not given."""
    return args.ulysses_degree is not None or _some_degree_splits(args, world)


def _has_window(args: HybridAttentionArgs, world: ms.World) -> bool:
    """Return whether ranks of the ring form inner rings."""
    return args.ulysses_degree is not None and args.window > 1


@ms.condition(
    "the ring of cp={world.cp} / ulysses_degree={args.ulysses_degree} ranks cannot be split into two or more inner rings of "
    "window={args.window} ranks",
    fix=(ms.Fix.give_setting("window", 1), ms.Fix.give_setting("window", note="a smaller divisor of the ring size")),
    when=_has_window,
)
def window_divides_ring(args: HybridAttentionArgs, world: ms.World) -> bool:
    """Check that inner rings are of equal size, and several."""
    degree = (args.ulysses_degree or 1) * args.window
    return bool(world.cp % degree == 0 and degree < world.cp)


def _first(sizes: Sequence[int]) -> int:
    """Return the size of the innermost level."""
    return sizes[0]


class HybridAttention(TwoLevelFeature[HybridAttentionArgs]):
    """Combine Ulysses attention with ring attention.

    Neighbouring ranks, such as those of a node, form a group. Inside a group, ranks exchange tokens for attention heads
    (Ulysses). Between groups, key/value blocks pass around a ring.
    """

    spec = ms.FeatureSpec(
        name="hybrid-attention",
        category=ms.Category.CONTEXT_PARALLEL,
        slots={ms.Slot.CONTEXT_PARALLEL},
        provides={ms.Capability.DOCUMENTS, ms.Capability.POSITION_BIAS},
        constraints=(
            *ALGORITHM,
            predicts_one_token,
            degree_is_given,
            some_degree_splits_ranks,
            degree_splits_ranks,
            degree_splits_heads,
            two_chunks_for_each_rank,
            window_divides_ring,
            interval_is_inside,
        ),
        megatron_flags=(
            ms.MegatronFlag("cp_comm_type", switch="on", values=("a2a+p2p",), size="cp"),
            ms.MegatronFlag("hierarchical_context_parallel_sizes", "ulysses_degree", convert=_first),
        ),
        numerics=ms.Numerics.reordered(reason="the softmax is summed block by block"),
        verify_with=ms.VerifyWith(settings={"hybrid-attention": {"ulysses_degree": 2}}, world={"cp": 4}),
        own_trainer='from mindspeed.nn import ContextParallelAttention  # algorithm="hybrid"',
    )

    ring_groups: Mapping[str, ProcessGroup] = MappingProxyType({})
    """Further communicators of the ranks of the ring, by name."""

    def _ring_communicators(self) -> list[str]:
        return communicators_of_ring(self.world.cp // self.degree(), self.args.window)

    @ms.hookimpl
    def communicators(self) -> Sequence[str]:
        return [*super().communicators(), *self._ring_communicators()]

    @ms.hookimpl
    def groups_created(self, sizes: dict[str, int], get_group: Callable[[str], Any]) -> None:
        from mindspeed.context_parallel.groups import make_ring_groups

        super().groups_created(sizes, get_group)
        if self.groups is not None:
            self.ring_groups = make_ring_groups(self.groups.outer, self._ring_communicators())

    @ms.hookimpl
    def groups_destroyed(self) -> None:
        from mindspeed.context_parallel.groups import destroy

        self.ring_groups = destroy(self.ring_groups)
        super().groups_destroyed()

    def core_attention(self) -> type[CoreAttention]:
        from mindspeed.features.hybrid_attention.layers import HybridCoreAttention

        return HybridCoreAttention

    def slicing(self) -> list[ms.Patch]:
        return [*sliced_by(f"{_LAYERS}:share_of_batch", f"{_LAYERS}:share_of_table", _REASON), *packed_in(_LAYERS)]

    @ms.hookimpl
    def cost(self) -> ms.Cost:
        """Count the bytes with the given neighbours, or else with the number that minimizes them."""
        world, degree = self.world, self.args.ulysses_degree
        a = attention_of(world)
        fitting = [n for n in range(2, world.cp) if world.cp % n == 0 and a.heads % n == 0]
        found = []
        for inner in [degree] if degree else fitting or [2]:
            sent = ulysses(a, inner)
            across = between(sent, inner, gcd(near(world), inner))
            settings = {} if degree else {"ulysses_degree": inner}
            found.append(cost(ring(head_all_to_all(a, inner), world.cp // inner), sent, across, **settings))
        return min(found, key=lambda one: one.amounts)

    def kept(self, tensors: SavedTensors, a: Attention) -> SavedTensors:
        degree = self.args.ulysses_degree or 1
        received = blocks_of_ring(head_all_to_all(a, degree), self.world.cp // degree, self.args.keep)
        return with_heads_exchanged(tensors, a, degree, received, self.args.interval)
