"""Share an attention mask among all layers and micro-batches."""

from __future__ import annotations

import re
from typing import Any, Final

from mindspeed.plugins import (
    After,
    ArgOverride,
    Capability,
    Category,
    Check,
    Feature,
    FeatureArgs,
    FeatureSpec,
    Field,
    RequiresCapability,
    Slot,
    World,
    hookimpl,
)

_NAMED: Final = ("causal", "sliding-window", "prefix")


class SharedAttentionMaskArgs(FeatureArgs):
    kind: str = Field(
        "causal",
        description="causal, sliding-window, prefix, or package.module:function, which gets the number of tokens and gives "
        "the mask [tokens, tokens], True where hidden",
    )
    width: int | None = Field(None, ge=1, description="keys that a query of a sliding window sees, its own among them")
    prefix: int | None = Field(None, ge=1, description="tokens at the start that every query sees")


def _is_own(args: Any, world: World) -> bool:
    return args.kind not in _NAMED


class SharedAttentionMask(Feature[SharedAttentionMaskArgs]):
    """The data loader makes no mask; the layers share one, made once, and none where the kernel needs none."""

    spec = FeatureSpec(
        name="shared-attention-mask",
        summary="One attention mask for all layers and micro-batches instead of one for each sample",
        category=Category.MEMORY,
        constraints=(
            Check(
                lambda args, world: re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", args.kind) is not None,
                "{args.kind} is no kind of mask and no package.module:function",
                fix="--set shared-attention-mask.kind=causal, or sliding-window, prefix, or a function of yours",
                when=_is_own,
            ),
            Check(
                lambda args, world: (args.width is not None) is (args.kind == "sliding-window"),
                "a width belongs to a sliding window and a sliding window has a width; the mask is {args.kind} and the width "
                "{args.width}",
                fix="--set shared-attention-mask.kind=sliding-window --set shared-attention-mask.width=N, or neither",
            ),
            Check(
                lambda args, world: (args.prefix is not None) is (args.kind == "prefix"),
                "a number of tokens that all see belongs to a prefix mask and it has one; the mask is {args.kind} and the "
                "prefix {args.prefix}",
                fix="--set shared-attention-mask.kind=prefix --set shared-attention-mask.prefix=N, or neither",
            ),
            After("flash-attention"),
            After("alibi"),
            RequiresCapability(
                Slot.CONTEXT_PARALLEL,
                Capability.SHARED_MASK,
                reason="any other takes a mask that is not causal from the batch",
                when=lambda args, world: args.kind != "causal" and world.cp > 1,
            ),
        ),
    )

    @hookimpl
    def megatron_args(self) -> list[ArgOverride]:
        return [ArgOverride("create_attention_mask_in_dataloader", False, "the layers share one mask")]

    @hookimpl
    def groups_destroyed(self) -> None:
        from mindspeed.context_parallel.attention_mask import mask_of

        mask_of.cache_clear()

    @hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        if self.world.cp > 1:
            return spec
        from mindspeed.context_parallel.attention_mask import MaskRule
        from mindspeed.features.shared_attention_mask.layers import with_shared_mask

        return with_shared_mask(spec, MaskRule(self.args.kind, self.args.width, self.args.prefix))
