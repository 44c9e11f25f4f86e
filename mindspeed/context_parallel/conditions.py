"""Conditions that several algorithms have: lengths of sequences, heads, and what attention over blocks can compute. Light."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from mindspeed import plugins as ms
from mindspeed.job.hybrid_pattern import ATTENTION

two_chunks_for_each_rank = ms.Condition.divides(
    "seq_length",
    (2, "cp"),
    "sequence length {world.seq_length} is not a multiple of 2 x cp = 2 x {world.cp}",
    fix=(ms.Fix.give_field("seq_length", note="a multiple of 2 x {world.cp}"),),
)


softmax_is_vanilla = ms.Condition.equals(
    "softmax_type", "vanilla", "softmax_type is {world.softmax_type}, but {feature} computes only the vanilla softmax"
)


@ms.condition(
    "attention has a sliding window (window_size), which {feature} does not support",
    fix=(ms.Fix.give_field("windowed_attention", False), ms.Fix.remove_feature()),
)
def attention_sees_all_keys(args: Any, world: ms.World) -> bool:
    """Check that attention has no window."""
    return not world.windowed_attention


@ms.condition(
    "multi-token prediction expects tokens in Megatron's zig-zag order, which {feature} does not use",
    fix=(
        ms.Fix.advise(
            "use a context-parallel feature with ring attention or all-gather (mindspeed features list --slot context-parallel "
            "shows them)"
        ),
        ms.Fix.give_field("mtp_num_layers", 0),
    ),
)
def predicts_one_token(args: Any, world: ms.World) -> bool:
    """Check that there is no multi-token prediction, whose tokens are in Megatron's own order."""
    return not world.is_set("mtp_num_layers")


def has_head_groups(args: Any, world: ms.World) -> bool:
    """Return whether ``ulysses_degree`` neighbours exchange tokens for heads."""
    return (args.ulysses_degree or 1) > 1


@ms.condition(
    "ulysses_degree={args.ulysses_degree} does not split cp={world.cp} into two or more groups of equal size",
    fix=(
        ms.Fix.give_field("cp", note="a multiple of {args.ulysses_degree}, at least 2 x {args.ulysses_degree}"),
        ms.Fix.give_setting("ulysses_degree", note="a divisor of {world.cp}, smaller than {world.cp}"),
    ),
    when=has_head_groups,
)
def degree_splits_ranks(args: Any, world: ms.World) -> bool:
    """Check that two or more groups of neighbours make the context-parallel ranks."""
    return bool(world.cp % args.ulysses_degree == 0 and world.cp > args.ulysses_degree)


degree_splits_heads = ms.Condition.divides(
    "num_attention_heads",
    ("args.ulysses_degree", "tp"),
    "{world.num_attention_heads} attention heads are not divisible by ulysses_degree x tp = {args.ulysses_degree} x {world.tp}",
    fix=(ms.Fix.give_setting("ulysses_degree", note="a divisor of the number of heads per tensor-parallel rank"),),
    when=has_head_groups,
)


class KeepArgs(ms.FeatureArgs):
    """Base of the settings of an algorithm that may keep received tensors for backward."""

    keep: Literal["none", "half", "full"] = "none"
    interval: int = ms.Field(
        0,
        ge=0,
        description="Apply the setting keep (tensors that are stored for backward) only to the first attention layer and to "
        "every (interval + 1)-th attention layer after it. All other layers use keep=none. 0 = apply keep to every layer. "
        "Layers of all pipeline stages are counted. In a HybridModel, layers without attention are not counted",
    )

    @model_validator(mode="after")
    def interval_has_keep(self) -> KeepArgs:
        """Refuse an interval of layers that keep nothing."""
        if self.interval and self.keep == "none":
            text = f"interval={self.interval} selects layers that keep keys and values, but with keep=none no layer does"
            raise ms.SettingsError(text, ms.Fix.give_setting("keep", "full"), ms.Fix.give_setting("interval", 0))
        return self


def _has_interval(args: KeepArgs, world: ms.World) -> bool:
    """Return whether only some layers keep tensors."""
    return args.interval > 0


def _attention_layers(args: KeepArgs, world: ms.World) -> dict[str, int]:
    """Return the number of attention layers of the model."""
    return {"layers": world.pattern.count(ATTENTION) if world.is_hybrid else world.num_layers}


@ms.condition(
    "the setting interval={args.interval} skips {args.interval} attention layers after each one to which the setting keep "
    "applies. The model has {layers} attention layers, so keep would apply only to the first one. With interval=0, it applies "
    "to every attention layer",
    fix=(ms.Fix.give_setting("interval", 0),),
    when=_has_interval,
    values=_attention_layers,
)
def interval_is_inside(args: KeepArgs, world: ms.World) -> bool:
    """Check that the interval is smaller than the number of attention layers."""
    return args.interval < _attention_layers(args, world)["layers"]


def keeps(attention_number: int, interval: int) -> bool:
    """Return whether an attention layer, counted from 1 over all stages, keeps tensors: ``interval`` of them lie between two
    that do."""
    return interval == 0 or attention_number % (interval + 1) == 1
