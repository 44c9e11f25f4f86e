"""Whole experts on tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed import plugins as ms


def _has_tensor_ranks(args: ms.FeatureArgs, world: ms.World) -> bool:
    """Return whether there are several tensor-parallel ranks."""
    return world.tp > 1


class MoeTpExtendEp(ms.Feature[ms.FeatureArgs]):
    """Place whole experts on tensor-parallel ranks.

    Each expert is stored whole on one rank instead of being split over tensor-parallel ranks.
    """

    spec = ms.FeatureSpec(
        name="moe-tp-extend-ep",
        category=ms.Category.MOE,
        constraints=(
            ms.Requires(
                "expert-parallel",
                reason="expert-parallel distributes experts over ranks and, with expert_tensor_size=1 (set by "
                "moe-tp-extend-ep), stores each expert whole on one rank",
                settings={"expert_tensor_size": 1},
            ),
            ms.Condition.at_least(
                "tp",
                2,
                "tensor parallelism is off (tp={world.tp}), so every expert is already whole and moe-tp-extend-ep has "
                "nothing to do",
            ),
            ms.Condition.divides(
                "ep",
                ("tp",),
                "ep={world.ep} is not a multiple of tp={world.tp}, but an expert-parallel group must consist of whole "
                "tensor-parallel groups, because every tensor-parallel rank holds experts",
                when=_has_tensor_ranks,
            ),
        ),
        numerics=ms.Numerics.reordered(
            reason="each expert receives tokens from several ranks, so its gradient sums them in a different order"
        ),
        verify_with=ms.VerifyWith(world={"tp": 2, "ep": 2}),
        own_trainer="Megatron splits experts over tensor-parallel ranks; mindspeed.nn.MoE never splits one",
    )

    @ms.hookimpl
    def megatron_args(self) -> list[ms.ArgOverride]:
        return [ms.ArgOverride("expert_tensor_parallel_size", 1, "every expert is stored whole on one rank")]

    @ms.hookimpl
    def groups_created(self, sizes: dict[str, int], get_group: Callable[[str], Any]) -> None:
        if (ranks := get_group("expt_tp").size()) > 1:
            name = self.spec.name
            text = (
                f"{name}: process groups split every expert over {ranks} tensor-parallel ranks, but the feature keeps "
                "experts whole"
            )
            fix = (ms.Fix.advise("remove the expert_tensor_parallel_size that the script sets"), ms.Fix.remove_feature(name))
            raise ms.MindSpeedError([ms.Problem("MS304", text, (name,), fix=fix)])
