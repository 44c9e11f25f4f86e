"""Patches and conflicts of features whose schedule pairs forward and backward passes. Light."""

from __future__ import annotations

from typing import Final

from mindspeed import plugins as ms

_HERE: Final = "mindspeed.pipeline.paired_transfers"

PAIRED_TRANSFERS: Final = (
    ms.Wrap(
        "megatron.core.tensor_parallel.mappings:all_to_all",
        f"{_HERE}:in_turns_with_another_pass",
        reason="posts the tokens of experts, and lets the other pass of a pair compute while they travel",
    ),
    ms.Wrap(
        "megatron.core.transformer.moe.moe_layer:MoELayer.forward",
        f"{_HERE}:with_states_of_its_own",
        reason="keeps the splits and tokens of each pass in a layer that two passes are inside of at once, one of them "
        "to repeat it",
    ),
)
"""The patches of a schedule with pairs."""


def know_one_pass(*names: str) -> tuple[ms.Conflicts, ...]:
    """Return the conflicts with features that know one pass at a time."""
    return tuple(ms.Conflicts(name, reason=f"{name} follows the passes of one micro-batch after the other") for name in names)
