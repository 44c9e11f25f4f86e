"""Attention and experts pipelined over chunks of the sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed.moe.feature import is_set, unserved
from mindspeed.plugins import (
    ArgOverride,
    Category,
    Check,
    Conflicts,
    DropSetting,
    Feature,
    FeatureArgs,
    FeatureSpec,
    Field,
    GiveField,
    MindSpeedError,
    Numerics,
    Problem,
    RemoveFeature,
    RequiresAny,
    Slot,
    VerifyWith,
    hookimpl,
)

_MASKS = "chunks are of causal or full attention"
_MODULES = "it changes modules that run once per micro-batch, and chunks run them several times"
_EXPERTS = "it recomputes or counts what experts get per micro-batch, and chunks come one by one"
_LINEAR = "it cuts the projection behind attention itself"


class AmpipeArgs(FeatureArgs):
    parts: int = Field(2, ge=2, description="chunks of the sequence that attention and experts take in turn")
    overlap: bool = Field(False, description="hide the transfers of tensor ranks that share an expert too")


class Ampipe(Feature[AmpipeArgs]):
    """The next chunk's attention runs while the tokens of a chunk travel to their experts, and backward mirrors it."""

    spec = FeatureSpec(
        name="ampipe",
        summary="Attention and experts in chunks of the sequence, transfers of one chunk behind another",
        category=Category.DEEPSPEED_MOE,
        megatron=">=0.14,<0.17",
        constraints=(
            RequiresAny(
                "deepspeed-moe", "moe-alltoall-overlap", reason="the layer posts its transfers, and waits for them later"
            ),
            Check(
                lambda args, world: world.ep > 1,
                "experts are on one rank, and there is no transfer to hide",
                fix=(GiveField("ep", 2, or_more=True), RemoveFeature()),
            ),
            Check(
                lambda args, world: world.seq_length % (args.parts * world.tp) == 0,
                "{args.parts} chunks cannot be made of {world.seq_length} tokens on {world.tp} tensor-parallel ranks",
                fix="use a divisor of the tokens of a rank for ampipe.parts",
            ),
            Check(
                lambda args, world, other: (other.groups or 1) % (args.parts * world.tp) == 0,
                "deepspeed-moe.groups is {other.groups}, and {args.parts} chunks on {world.tp} tensor-parallel ranks, "
                "each with a capacity of its own, need a multiple of both",
                fix="use a multiple of {args.parts} x {world.tp} for deepspeed-moe.groups",
                of="deepspeed-moe",
            ),
            Check(
                lambda args, world, other: other.granularity != "selective",
                "recompute.granularity is {other.granularity}, and the modules of a layer run once per chunk",
                fix="--set recompute.granularity=full, or remove ampipe",
                of="recompute",
            ),
            Check(
                lambda args, world: world.tp > 1,
                "overlap hides transfers of tensor ranks, and tp is {world.tp}",
                fix=(GiveField("tp", 2, or_more=True), DropSetting("overlap")),
                when=lambda args, world: args.overlap,
            ),
            Check(
                lambda args, world: not world.multi_latent_attention,
                "attention is multi-latent, and its keys are not those of the whole sequence",
                fix="remove ampipe",
            ),
            Check(
                lambda args, world: not is_set(world, "expert_capacity_factor"),
                "expert_capacity_factor is {world.expert_capacity_factor}, and its places are of all tokens together",
                fix="--expert-capacity-factor 0, or remove ampipe",
            ),
            *unserved("ampipe"),
            Conflicts(
                "moe-alltoall-overlap",
                reason="its transfers of tensor ranks are part of the dispatch, and ampipe.overlap has none to hide",
                when=lambda args, world: args.overlap,
            ),
            Conflicts(Slot.CONTEXT_PARALLEL, reason="a rank has all keys of its chunks"),
            Conflicts(Slot.PIPELINE_SCHEDULE, reason="the schedule cuts layers where chunks are under way"),
            Conflicts(Slot.LINEAR, reason=_LINEAR),
            *(Conflicts(name, reason=_MASKS) for name in ("eod-reset", "shared-attention-mask")),
            *(
                Conflicts(name, reason=_MODULES)
                for name in ("norm-recompute", "activation-recompute", "swap-attention", "adaptive-recompute")
            ),
            *(Conflicts(name, reason=_EXPERTS) for name in ("moe-zero-memory", "moe-adaptive-recompute", "moe-load-report")),
        ),
        numerics=Numerics.reordered(
            reason="against the same layer in one piece, of deepspeed-moe with equal groups: gradients of weights and keys are "
            "summed chunk by chunk; with dropout or noise of the gate other elements are drawn"
        ),
        verify_with=VerifyWith(
            algorithm=("mindspeed.features.ampipe.attention",),
            features=("deepspeed-moe",),
            settings={"deepspeed-moe": {"groups": 2}},
            world={"ep": 2},
        ),
    )

    @hookimpl
    def megatron_args(self) -> list[ArgOverride]:
        reason = "Megatron's fused softmax takes causal scores of equally many queries and keys alone"
        return [ArgOverride("masked_softmax_fusion", False, reason)]

    @hookimpl
    def config_ready(self, config: Any) -> None:
        if not config.num_moe_experts:
            return
        from mindspeed.features.ampipe.limits import misfits

        if wrong := misfits(config):
            name = self.spec.name
            raise MindSpeedError([Problem("MS304", f"{name}: {text}", (name,), fix=fix) for text, fix in wrong.items()])

    @hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        from mindspeed.features.ampipe.layers import with_chunks

        return with_chunks(spec, self.args.parts, self.args.overlap) if config.num_moe_experts else spec

    @hookimpl
    def model_built(self, chunks: Sequence[Any]) -> None:
        from mindspeed.features.ampipe.layers import check_layers

        for chunk in chunks:
            check_layers(chunk)
