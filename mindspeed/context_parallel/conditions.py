"""Conditions that several algorithms have: lengths of sequences, heads, and what attention over blocks can compute. Light."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from mindspeed.job.hybrid_pattern import ATTENTION
from mindspeed.job.world import World
from mindspeed.plugins.conditions import Condition, condition
from mindspeed.plugins.feature import FeatureArgs
from mindspeed.problems.fixes import Fix, SettingsError

two_chunks_for_each_rank = Condition.divides(
    "seq_length",
    (2, "cp"),
    "sequence length {world.seq_length} is not a multiple of 2 x cp = 2 x {world.cp}",
    fix=(Fix.give_field("seq_length", note="a multiple of 2 x {world.cp}"),),
)


softmax_is_vanilla = Condition.equals(
    "softmax_type", "vanilla", "softmax_type is {world.softmax_type}, but {feature} computes only the vanilla softmax"
)


@condition(
    "attention has a sliding window (window_size), which {feature} does not support",
    fix=(Fix.give_field("windowed_attention", False), Fix.remove_feature()),
)
def attention_sees_all_keys(args: Any, world: World) -> bool:
    """Check that attention has no window."""
    return not world.windowed_attention


predicts_one_token = Condition.unset(
    "mtp_num_layers",
    "multi-token prediction expects tokens in Megatron's zig-zag order, which {feature} does not use",
    fix=(
        Fix.advise(
            "use a context-parallel feature with ring attention or all-gather (mindspeed features list --slot context-parallel "
            "shows them)"
        ),
        Fix.give_field("mtp_num_layers", 0),
    ),
)


def has_head_groups(args: Any, world: World) -> bool:
    """Return whether ``ulysses_degree`` neighbours exchange tokens for heads."""
    return (args.ulysses_degree or 1) > 1


@condition(
    "ulysses_degree={args.ulysses_degree} does not split cp={world.cp} into two or more groups of equal size",
    fix=(
        Fix.give_field("cp", note="a multiple of {args.ulysses_degree}, at least 2 x {args.ulysses_degree}"),
        Fix.give_setting("ulysses_degree", note="a divisor of {world.cp}, smaller than {world.cp}"),
    ),
    when=has_head_groups,
)
def degree_splits_ranks(args: Any, world: World) -> bool:
    """Check that two or more groups of neighbours make the context-parallel ranks."""
    return bool(world.cp % args.ulysses_degree == 0 and world.cp > args.ulysses_degree)


degree_splits_heads = Condition.divides(
    "num_attention_heads",
    ("args.ulysses_degree", "tp"),
    "{world.num_attention_heads} attention heads are not divisible by ulysses_degree x tp = {args.ulysses_degree} x {world.tp}",
    fix=(Fix.give_setting("ulysses_degree", note="a divisor of the number of heads per tensor-parallel rank"),),
    when=has_head_groups,
)


class KeepArgs(FeatureArgs):
    """Base of the settings of an algorithm that may keep received tensors for backward."""

    keep: Literal["none", "half", "full"] = "none"
    interval: int = Field(
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
            raise SettingsError(text, Fix.give_setting("keep", "full"), Fix.give_setting("interval", 0))
        return self


def _attention_layers(args: KeepArgs, world: World) -> dict[str, int]:
    """Return the number of attention layers of the model."""
    return {"layers": world.pattern.count(ATTENTION) if world.is_hybrid else world.num_layers}


@condition(
    "the setting interval={args.interval} skips {args.interval} attention layers after each one to which the setting keep "
    "applies. The model has {layers} attention layers, so keep would apply only to the first one. With interval=0, it applies "
    "to every attention layer",
    fix=(Fix.give_setting("interval", 0),),
    when=lambda args, world: args.interval > 0,
    values=_attention_layers,
)
def interval_is_inside(args: KeepArgs, world: World) -> bool:
    """Check that the interval is smaller than the number of attention layers."""
    return args.interval < _attention_layers(args, world)["layers"]


def keeps(attention_number: int, interval: int) -> bool:
    """Return whether an attention layer, counted from 1 over all stages, keeps tensors: ``interval`` of them lie between two
    that do."""
    return interval == 0 or attention_number % (interval + 1) == 1
