"""Options for fields of Megatron's configuration that Megatron-LM's parser lacks. Light, except for what a parser calls.

Megatron-LM makes its configuration from the attributes of its arguments that have the names of fields, so that an option with
such a name is all that a field needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from mindspeed.inspection.cli_arguments import Argument, Surface

FIELD_OPTIONS: Final = (
    Argument(("--original-max-position-embeddings",), "original_max_position_embeddings", type="int"),
    Argument(("--beta-fast",), "beta_fast", type="float"),
    Argument(("--beta-slow",), "beta_slow", type="float"),
)
"""Fields of the YaRN rotary embedding of multi-latent attention."""

_KINDS: Final = {"int": int, "float": float}


def with_field_options(known: Surface) -> Surface:
    """The arguments of a Megatron-LM and the options of this module that it does not have itself."""
    missing = tuple(argument for argument in FIELD_OPTIONS if known.by_option.keys().isdisjoint(argument.options))
    return replace(known, arguments=(*known.arguments, *missing))


def add_field_options(provider: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    """Wrap a script's ``extra_args_provider``: after it, the parser has the options; one that is not given sets nothing."""

    def provide(parser: Any) -> Any:
        import argparse

        parser = provider(parser) if provider is not None else parser
        for argument in FIELD_OPTIONS:
            if parser._option_string_actions.keys().isdisjoint(argument.options):
                kind = _KINDS[argument.type or "int"]
                parser.add_argument(*argument.options, dest=argument.dest, type=kind, default=argparse.SUPPRESS)
        return parser

    return provide
