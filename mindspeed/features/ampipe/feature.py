"""Attention and experts pipelined over chunks of the sequence."""

from __future__ import annotations

from typing import Any

from mindspeed.features.ampipe.conditions import CONDITIONS, AmpipeArgs, overlaps
from mindspeed.plugins import (
    ArgOverride,
    Category,
    Conflicts,
    Feature,
    FeatureSpec,
    ModelCondition,
    Numerics,
    RequiresAny,
    Slot,
    VerifyWith,
    hookimpl,
)

_MASKS = "chunks are of causal or full attention"
_MODULES = "it changes modules that run once per micro-batch, and chunks run them several times"
_EXPERTS = "it recomputes or counts what experts get per micro-batch, and chunks come one by one"


class Ampipe(Feature[AmpipeArgs]):
    """Overlap attention with expert all-to-alls.

    Sequences are split into chunks. The next chunk's attention runs while the tokens of a chunk travel to their
    experts, and backward mirrors it.
    """

    spec = FeatureSpec(
        name="ampipe",
        category=Category.DEEPSPEED_MOE,
        megatron=">=0.14,<0.17",
        constraints=(
            RequiresAny(
                "deepspeed-moe", "moe-alltoall-overlap", reason="the layer posts its transfers, and waits for them later"
            ),
            *CONDITIONS,
            Conflicts(
                "moe-alltoall-overlap",
                reason="its transfers of tensor ranks are part of the dispatch, and ampipe.overlap has none to hide",
                when=overlaps,
            ),
            Conflicts(Slot.PIPELINE_SCHEDULE, reason="the schedule splits layers whose chunks are still in flight"),
            Conflicts(Slot.LINEAR, reason="it splits the projection after attention itself"),
            *(Conflicts(name, reason=_MASKS) for name in ("eod-reset", "shared-attention-mask")),
            *(
                Conflicts(name, reason=_MODULES)
                for name in ("norm-recompute", "activation-recompute", "swap-attention", "adaptive-recompute")
            ),
            *(Conflicts(name, reason=_EXPERTS) for name in ("moe-zero-memory", "moe-adaptive-recompute", "moe-load-report")),
            ModelCondition(
                "mindspeed.features.ampipe.layers:unfit_layers",
                "layers have local core attention, no cross-attention, and experts whose transfers are posted",
            ),
        ),
        numerics=Numerics.reordered(
            reason="against the same layer in one piece, of deepspeed-moe with equal groups: gradients of weights and keys are "
            "summed chunk by chunk; with dropout or noise of the gate other elements are drawn"
        ),
        verify_with=VerifyWith(
            algorithm=("mindspeed.features.ampipe.attention",),
            features=("deepspeed-moe",),
            settings={"deepspeed-moe": {"groups": 4}},
            world={"ep": 2},
        ),
    )

    @hookimpl
    def megatron_args(self) -> list[ArgOverride]:
        reason = "Megatron's fused softmax takes causal scores of equally many queries and keys alone"
        return [ArgOverride("masked_softmax_fusion", False, reason)]

    @hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        from mindspeed.features.ampipe.layers import with_chunks

        return with_chunks(spec, self.args.parts, self.args.overlap)
