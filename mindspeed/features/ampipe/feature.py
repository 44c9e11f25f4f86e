"""Attention and experts pipelined over chunks of the sequence."""

from __future__ import annotations

from typing import Any

from mindspeed import plugins as ms
from mindspeed.features.ampipe.conditions import CONDITIONS, AmpipeArgs, overlaps

_MASKS = "ampipe computes only causal or full attention, but that feature passes a mask or document ends to attention"
_MODULES = "ampipe calls layers once per sequence chunk, but that feature expects one call per micro-batch"
_EXPERTS = "ampipe sends tokens to experts chunk by chunk, but that feature handles the tokens of a whole micro-batch"


class Ampipe(ms.Feature[AmpipeArgs]):
    """Overlap attention with expert all-to-alls.

    Sequences are split into chunks. While the tokens of one chunk are sent to their experts, attention of the next
    chunk is computed. Backward does the same in reverse order.
    """

    spec = ms.FeatureSpec(
        name="ampipe",
        category=ms.Category.DEEPSPEED_MOE,
        megatron=">=0.14,<0.17",
        constraints=(
            ms.RequiresAny(
                "deepspeed-moe",
                "moe-alltoall-overlap",
                reason="ampipe overlaps attention with all-to-alls that run in the background, and only these features start "
                "such all-to-alls",
            ),
            *CONDITIONS,
            ms.Conflicts(
                "moe-alltoall-overlap",
                reason="ampipe.overlap=true overlaps the tensor-parallel transfers of experts, which moe-alltoall-overlap also "
                "does (with ampipe.overlap=false both work together)",
                when=overlaps,
            ),
            ms.Conflicts(
                ms.Slot.PIPELINE_SCHEDULE,
                reason="features with a pipeline schedule defer weight gradients, but ampipe computes them chunk by chunk in "
                "backward",
            ),
            ms.Conflicts(
                ms.Slot.LINEAR,
                reason="features that replace linear layers (coc, mc2, tensor-parallel-2d and others) also replace the linear "
                "layer after attention, which ampipe computes chunk by chunk",
            ),
            *(ms.Conflicts(name, reason=_MASKS) for name in ("eod-reset", "shared-attention-mask")),
            *(
                ms.Conflicts(name, reason=_MODULES)
                for name in ("norm-recompute", "activation-recompute", "swap-attention", "adaptive-recompute")
            ),
            *(ms.Conflicts(name, reason=_EXPERTS) for name in ("moe-zero-memory", "moe-adaptive-recompute", "moe-load-report")),
            ms.ModelCondition(
                "mindspeed.features.ampipe.layers:unfit_layers",
                "layers have local core attention, no cross-attention, and experts with asynchronous transfers",
            ),
        ),
        numerics=ms.Numerics.reordered(
            reason="the sequence is processed in chunks, so gradients of weights, keys and values are sums over chunks. "
            "Dropout and gate noise draw other random numbers than without chunks"
        ),
        verify_with=ms.VerifyWith(
            algorithm=("mindspeed.features.ampipe.attention",),
            features=("deepspeed-moe",),
            settings={"deepspeed-moe": {"groups": 4}},
            world={"ep": 2},
        ),
    )

    @ms.hookimpl
    def megatron_args(self) -> list[ms.ArgOverride]:
        reason = "Megatron's fused softmax needs equal numbers of queries and keys, but queries come in chunks"
        return [ms.ArgOverride("masked_softmax_fusion", False, reason)]

    @ms.hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        from mindspeed.features.ampipe.layers import with_chunks

        return with_chunks(spec, self.args.parts, self.args.overlap)
