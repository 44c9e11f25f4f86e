"""Options for fields of Megatron's configuration that Megatron-LM's parser lacks. Light.

They are taken from the command line before that parser reads it, and reach the configuration as a feature's arguments do.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from mindspeed.engine.inspection.cli_arguments import Argument, Surface

FIELD_OPTIONS: Final = (
    Argument(("--original-max-position-embeddings",), "original_max_position_embeddings", type="int"),
    Argument(("--beta-fast",), "beta_fast", type="float"),
    Argument(("--beta-slow",), "beta_slow", type="float"),
)
"""Fields of the YaRN rotary embedding of multi-latent attention."""


def with_field_options(known: Surface) -> Surface:
    """The arguments of a Megatron-LM and the options of this module that it does not have itself."""
    missing = tuple(argument for argument in FIELD_OPTIONS if known.by_option.keys().isdisjoint(argument.options))
    return replace(known, arguments=(*known.arguments, *missing))


def field_options_in(known: Surface) -> tuple[Argument, ...]:
    """The options among these that are not Megatron-LM's own."""
    return tuple(argument for argument in FIELD_OPTIONS if known.by_option.get(argument.options[0]) is argument)
