"""Whole experts on tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed.plugins import (
    ArgOverride,
    Category,
    Check,
    Feature,
    FeatureArgs,
    FeatureSpec,
    GiveField,
    MindSpeedError,
    Numerics,
    Problem,
    RemoveFeature,
    Requires,
    VerifyWith,
    hookimpl,
)


class MoeTpExtendEp(Feature[FeatureArgs]):
    """Experts are spread over tensor-parallel ranks as well instead of split by them: expert tensor size 1."""

    spec = FeatureSpec(
        name="moe-tp-extend-ep",
        summary="Experts spread over tensor-parallel ranks instead of split by them",
        category=Category.MOE,
        constraints=(
            Requires("expert-parallel", reason="it places the experts", settings={"expert_tensor_size": 1}),
            Check(
                lambda args, world: world.tp > 1,
                "there is one tensor-parallel rank, and no expert is split",
                fix=(GiveField("tp", 2, or_more=True), RemoveFeature()),
            ),
            Check(
                lambda args, world: world.ep % world.tp == 0,
                "--ep {world.ep} counts all ranks with experts, and is not a multiple of --tp {world.tp}",
                fix=(GiveField("ep", note="a multiple of {world.tp}"), RemoveFeature()),
                when=lambda args, world: world.tp > 1,
            ),
        ),
        numerics=Numerics.reordered(reason="gradients of an expert are sums over the tokens of other ranks"),
        verify_with=VerifyWith(world={"tp": 2, "ep": 2}),
    )

    @hookimpl
    def megatron_args(self) -> list[ArgOverride]:
        return [ArgOverride("expert_tensor_parallel_size", 1, "every expert is on one rank")]

    @hookimpl
    def groups_created(self, sizes: dict[str, int], get_group: Callable[[str], Any]) -> None:
        if (ranks := get_group("expt_tp").size()) > 1:
            text = f"groups split every expert over {ranks} tensor-parallel ranks, and moe-tp-extend-ep keeps experts whole"
            fix = "drop the script's own expert_tensor_parallel_size, or remove moe-tp-extend-ep"
            raise MindSpeedError([Problem("MS304", text, ("moe-tp-extend-ep",), fix=fix)])
