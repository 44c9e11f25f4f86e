"""Share an attention mask among all layers and micro-batches."""

from __future__ import annotations

from typing import Any, Final

from pydantic import field_validator, model_validator

from mindspeed import plugins as ms
from mindspeed.context_parallel.mask_rules import MASKS, RULES, own_masks
from mindspeed.plugins.saved_tensors import SavedTensor, SavedTensors
from mindspeed.plugins.shared_conditions import NO_TRANSFORMER_ENGINE_LAYERS

_SCORES: Final = "attention: score buffer"
"""Name a tensor that dense attention keeps; a kernel that needs no mask keeps none."""


class SharedAttentionMaskArgs(ms.FeatureArgs):
    kind: str = ms.Field(
        "causal",
        description="Attention mask of all layers: causal, sliding-window, prefix, or the name of a mask that an installed "
        "package adds",
    )
    width: int | None = ms.Field(
        None,
        ge=1,
        description="With kind=sliding-window: number of keys that a query attends to, including the one at its position",
    )
    prefix: int | None = ms.Field(
        None, ge=1, description="With kind=prefix: number of tokens at the start of a sequence that every query attends to"
    )

    @field_validator("kind")
    @classmethod
    def _kind_is_known(cls, kind: str) -> str:
        if kind in RULES:  # without a look at what is installed
            return kind
        known = (*RULES, *own_masks())
        if kind not in known:
            text = f"a mask must be {', '.join(RULES)}, or one that an installed package adds by the entry-point group {MASKS}"
            raise ms.SettingsError(text, *(ms.Fix.give_setting("kind", name) for name in known))
        return kind

    @model_validator(mode="after")
    def _numbers_belong_to_kind(self) -> SharedAttentionMaskArgs:
        for setting, kind in (("width", "sliding-window"), ("prefix", "prefix")):
            if (getattr(self, setting) is not None) is not (self.kind == kind):
                if self.kind == kind:
                    text = f"kind={kind} needs {setting}, which is not set"
                    raise ms.SettingsError(text, ms.Fix.give_setting(setting), ms.Fix.give_setting("kind", "causal"))
                text = f"{setting} is {getattr(self, setting)}, but only kind={kind} uses it, and kind is {self.kind}"
                raise ms.SettingsError(text, ms.Fix.drop_setting(setting), ms.Fix.give_setting("kind", kind))
        return self


def _needs_capability(args: SharedAttentionMaskArgs, world: ms.World) -> bool:
    """Return whether context-parallel ranks share a mask that is not causal."""
    return args.kind != "causal" and bool(world.cp > 1)


def _is_causal(args: SharedAttentionMaskArgs, world: ms.World) -> bool:
    """Return whether the mask is causal."""
    return args.kind == "causal"


one_rank_has_the_sequence = ms.Condition.equals(
    "cp",
    1,
    "context parallelism (cp={world.cp}) computes the causal mask itself, so layers have no mask to share",
    fix=(ms.Fix.remove_feature(),),
    when=_is_causal,
    otherwise="idle",
)


class SharedAttentionMask(ms.Feature[SharedAttentionMaskArgs]):
    """Share one attention mask among all layers.

    The mask is created once and used by all layers, instead of one mask per batch from the data loader. Where the
    attention kernel applies a causal mask itself, none is created.
    """

    spec = ms.FeatureSpec(
        name="shared-attention-mask",
        category=ms.Category.MEMORY,
        constraints=(
            NO_TRANSFORMER_ENGINE_LAYERS,
            one_rank_has_the_sequence,
            ms.After("flash-attention"),
            ms.After("alibi"),
            ms.RequiresCapability(
                ms.Slot.CONTEXT_PARALLEL,
                ms.Capability.SHARED_MASK,
                reason="each rank must take its part of the mask that shared-attention-mask stores. Only adaptive-cp does this",
                when=_needs_capability,
            ),
        ),
        own_trainer="it replaces the masks of Megatron's data loader; the attention of mindspeed.nn reads no mask",
    )

    @ms.hookimpl
    def megatron_args(self) -> list[ms.ArgOverride]:
        return [
            ms.ArgOverride(
                "create_attention_mask_in_dataloader", False, "all layers share one mask, so the data loader creates none"
            )
        ]

    @ms.hookimpl
    def saved_tensors(self, tensors: SavedTensors) -> SavedTensors:
        by_kernel = all(tensor.name != _SCORES for tensor in tensors)
        if self.world.cp > 1 or (by_kernel and self.args.kind in ("causal", "sliding-window")):
            return tensors
        mask = SavedTensor("attention: shared mask", self.world.seq_length**2, 1, by=self.spec.name, once=True)
        return (*tensors, mask)

    @ms.hookimpl
    def groups_destroyed(self) -> None:
        from mindspeed.context_parallel.attention_mask import mask_of

        mask_of.cache_clear()

    @ms.hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        if self.world.cp > 1:
            return spec
        from mindspeed.context_parallel.mask_rules import MaskRule
        from mindspeed.features.shared_attention_mask.layers import with_shared_mask

        return with_shared_mask(spec, MaskRule(self.args.kind, self.args.width, self.args.prefix))
