"""Megatron-LM's check of the length of a sequence, which knows zig-zag only."""

from __future__ import annotations

from typing import Any

from mindspeed.plugins.patches import Function, wrapper


@wrapper
def take_any_length(validate_args: Function, args: Any, *rest: Any, **kwargs: Any) -> Any:
    """Wrap ``validate_args(args, ...)``: the length is passed under its other name, which may be any number.

    Megatron-LM takes ``encoder_seq_length`` for ``seq_length`` where that is not given, and then sets both.
    """
    if args.encoder_seq_length is None:
        args.encoder_seq_length, args.seq_length = args.seq_length, None
    return validate_args(args, *rest, **kwargs)
