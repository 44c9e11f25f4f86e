"""Capacity-gated experts one after another, while the rows of the others travel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed.plugins import (
    After,
    Category,
    Check,
    DropSetting,
    Feature,
    FeatureArgs,
    FeatureSpec,
    Field,
    GiveField,
    GiveSetting,
    MindSpeedError,
    Numerics,
    Problem,
    RemoveFeature,
    Requires,
    VerifyWith,
    hookimpl,
)


class PipeExpertsArgs(FeatureArgs):
    parts: int = Field(1, ge=1, description="slices of the places of each expert; a unit is one expert and one slice")
    streams: bool = Field(
        False, description="transfers of the expert group and of the expert-tensor group are never in flight together"
    )


class PipeExperts(Feature[PipeExpertsArgs]):
    """A unit, one expert and a slice of its places, is computed while other units are dispatched and returned."""

    spec = FeatureSpec(
        name="pipe-experts",
        summary="Dispatch, products and return of capacity-gated experts overlap, expert by expert and slice by slice",
        category=Category.DEEPSPEED_MOE,
        megatron=">=0.14,<0.17",
        constraints=(
            Requires("deepspeed-moe", reason="its experts have a number of places that can be sliced, equal on all ranks"),
            Requires("moe-grouped-gemm", reason="the experts of a rank are computed one by one, with one weight gradient each"),
            After("deepspeed-moe"),
            After("moe-grouped-gemm"),
            Check(
                lambda args, world: world.ep * world.tp > 1,
                "experts are on one rank, and there is no transfer to hide",
                fix=(GiveField("ep", 2, or_more=True), RemoveFeature()),
            ),
            Check(
                lambda args, world: args.parts * world.num_experts > world.ep,
                "a rank has {world.num_experts} / {world.ep} experts and parts={args.parts}: one unit, which nothing can hide",
                fix=(GiveSetting("parts", 2), GiveField("ep", note="a smaller one")),
            ),
            Check(
                lambda args, world: args.parts <= world.seq_length * world.micro_batch_size,
                "parts={args.parts} is more than the {world.seq_length} x {world.micro_batch_size} tokens of a micro-batch, "
                "and an expert has no more places",
                fix="use a smaller pipe-experts.parts",
                when=lambda args, world: args.parts > 1,
            ),
            Check(
                lambda args, world: world.tp > 1,
                "streams keeps transfers of tensor ranks apart, and tp={world.tp} has none",
                fix=(DropSetting("streams"), GiveField("tp", 2, or_more=True)),
                when=lambda args, world: args.streams,
            ),
        ),
        numerics=Numerics.reordered(
            reason="an expert's products have fewer rows, and its weight gradient sums rows in another order"
        ),
        verify_with=VerifyWith(
            algorithm=("mindspeed.moe.units",),
            features=("deepspeed-moe",),
            settings={"pipe-experts": {"parts": 2}},
            world={"ep": 2},
        ),
    )

    @hookimpl
    def groups_created(self, sizes: dict[str, int], get_group: Callable[[str], Any]) -> None:
        if self.args.streams and get_group("expt_tp").size() == 1:
            text = "groups have one expert-tensor rank, and streams keeps its transfers apart from those of the expert group"
            raise self._problem(text, "drop pipe-experts.streams, or set expert-parallel.expert_tensor_size=2 or more")

    @hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        if not config.num_moe_experts:
            return spec
        from mindspeed.features.pipe_experts.spec import places, with_units
        from mindspeed.moe.limits import has_other_experts

        if has_other_experts(spec):
            self.decline("the layer spec has experts that are not grouped by moe-grouped-gemm, such as Transformer Engine's")
            return spec
        most = places(spec, config, self.world)
        if most is not None and self.args.parts > most:
            text = f"parts={self.args.parts} is more than the {most} places of an expert"
            raise self._problem(text, f"use at most {most} for pipe-experts.parts, or a larger deepspeed-moe.capacity_factor")
        return with_units(spec, self.args)

    def _problem(self, text: str, fix: str) -> MindSpeedError:
        return MindSpeedError([Problem("MS304", f"{self.spec.name}: {text}", (self.spec.name,), fix=fix)])
