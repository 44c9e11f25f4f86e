"""Rules that several algorithms have: lengths of sequences, and which layers keep keys and values for backward. Light."""

from __future__ import annotations

from typing import Final

from mindspeed.plugins import Check, Condition

TWO_PIECES: Final = Check(
    lambda args, world: world.seq_length % (2 * world.cp) == 0,
    "sequence length {world.seq_length} is not a multiple of 2 x cp = 2 x {world.cp}",
    fix="use a --seq-length that is a multiple of 2 x {world.cp}",
    when=lambda args, world: world.cp > 1,
)
"""Zig-zag gives each rank an early and a late piece."""


def keeps(layer_number: int, interval: int) -> bool:
    """Tell whether a layer, counted from 1 over all stages, keeps tensors: ``interval`` layers lie between two that do."""
    return interval == 0 or layer_number % (interval + 1) == 1


def interval_checks(feature: str) -> tuple[Condition, ...]:
    """Checks of the setting ``interval``, which says where the setting ``keep`` of the feature holds."""
    return (
        Check(
            lambda args, world: args.keep != "none",
            "interval {args.interval} says which layers keep something, and keep is none",
            fix=f"--set {feature}.keep=full, or --set {feature}.interval=0",
            when=lambda args, world: args.interval > 0,
        ),
        Check(
            lambda args, world: args.interval < world.num_layers,
            "interval {args.interval} is not below the number of layers, {world.num_layers}",
            fix=f"--set {feature}.interval=0, or another below {{world.num_layers}}",
            when=lambda args, world: args.interval > 0,
        ),
    )
