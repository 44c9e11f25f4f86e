"""Megatron-LM's arguments on a command line, as its parser reads them, known from the recorded ones. Light."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from shlex import join
from typing import Any, Final

from mindspeed.engine.inspection.cli_arguments import Argument, Surface, surface
from mindspeed.engine.inspection.releases import recorded_releases
from mindspeed.engine.planning.fingerprint import text_of
from mindspeed.engine.resolution.planned_feature import PlanNote
from mindspeed.engine.resolution.request import Layer
from mindspeed.files.data_digest import data_facts
from mindspeed.megatron_lm.argument_words import ArgumentWords, Count
from mindspeed.plugins.feature import MegatronFlag
from mindspeed.problems import GivenValue

KINDS: Final = {"int": int, "float": float}
"""Types of values that are not text."""
FIELD_OPTIONS: Final = (
    Argument(("--original-max-position-embeddings",), "original_max_position_embeddings", type="int"),
    Argument(("--beta-fast",), "beta_fast", type="float"),
    Argument(("--beta-slow",), "beta_slow", type="float"),
)
"""Options for fields of Megatron's configuration that its parser lacks: the YaRN rotary embedding of multi-latent attention.

They are taken from the command line before that parser reads it, and reach the configuration as a feature's arguments do.
"""


@dataclass(frozen=True, slots=True)
class Given:
    """Describe an argument on the command line: the option as it was written, and its value."""

    option: str
    value: Any

    @property
    def source(self) -> str:
        return f"Megatron's {self.option}"

    @property
    def fact(self) -> GivenValue:
        """The argument as a value at fault."""
        return GivenValue(self.option, self.value, self.source, self.option)


def given_arguments(arguments: Sequence[str], known: Surface) -> dict[str, Given]:
    """``{dest: Given}`` for Megatron's arguments on a command line; empty where Megatron's parser will refuse the line."""
    return arguments_and_others(arguments, known)[0]


def arguments_and_others(arguments: Sequence[str], known: Surface) -> tuple[dict[str, Given], list[str]]:
    """Return `given_arguments`, and the words of a command line that are none of Megatron's arguments."""
    try:
        parsed, others = _parser(known).parse_known_args(list(arguments))
    except argparse.ArgumentError:
        return {}, list(arguments)
    return {dest: value for dest, value in vars(parsed).items() if isinstance(value, Given)}, others


def without_arguments(
    given: Mapping[str, Given],
    arguments: Sequence[str],
    known: Surface,
    declared: Sequence[tuple[str, MegatronFlag]],
    layers: Sequence[Layer],
) -> tuple[dict[str, Given], list[str], list[PlanNote]]:
    """Remove Megatron's arguments of every feature that ``layers`` remove from a command line, each with a note.

    ``declared`` are features with their arguments. Returns what remains of ``given`` and of ``arguments``. A feature that
    the same layers request is left as it is.
    """
    requested = {name for layer in layers for name in layer.features}
    owners = {
        flag.dest: (name, layer.source)
        for layer in layers
        for name in layer.without
        if name not in requested
        for feature, flag in declared
        if feature == name and flag.dest in given and not flag.is_choice and (flag.switch == "on" or flag.setting)
    }
    notes = [
        PlanNote("note", name, f"{given[dest].source} is ignored: {source} removes {name}")
        for dest, (name, source) in sorted(owners.items())
    ]
    rest = list(arguments)
    for dest in owners:
        rest = without_option(rest, dest, known)
    return {dest: value for dest, value in given.items() if dest not in owners}, rest, notes


def without_option(arguments: Sequence[str], dest: str, known: Surface) -> list[str]:
    """The command line without the options of one argument and their values."""
    made = ArgumentWords(list(arguments))
    for argument in known.by_dest.get(dest, ()):
        count: Count = 0 if not argument.takes_value else "+" if argument.nargs in ("+", "*", "?") else int(argument.nargs or 1)
        for option in argument.options:
            made.take(option, count)
    return made.words


def abbreviations(arguments: Sequence[str], known: Surface) -> list[PlanNote]:
    """A note for every option that is the beginning of options of Megatron, whose parser takes no abbreviations."""
    notes = []
    for option in dict.fromkeys(unknown_options(arguments, known)):
        longer = [name for name in known.by_option if name.startswith(option)]
        if longer:
            text = f"{option} is not an option of Megatron-LM, which accepts no abbreviations; similar options: "
            notes.append(PlanNote("warning", "megatron-lm", text + ", ".join(sorted(longer)[:3])))
    return notes


def unknown_options(arguments: Sequence[str], known: Surface) -> list[str]:
    """Options on a command line that Megatron's parser does not have by itself."""
    options = (word.partition("=")[0] for word in arguments if word.startswith("--") and len(word) > 2)
    return [option for option in options if option not in known.by_option]


def argument_facts(arguments: Sequence[str], version: str | None) -> dict[str, str]:
    """The arguments of a command line as facts of a lock: those of Megatron-LM of this version, and all others together."""
    given, others = arguments_and_others(arguments, surface_or_nearest(version))
    facts = {f"option {dest}": text_of(argument.value) for dest, argument in given.items()}
    return facts | ({"option others": join(others)} if others else {})


DATA: Final = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
"""Arguments with the prefixes of indexed data, and weights between them."""
_OF_PROCESS: Final = frozenset({"rank", "local_rank", "world_size"})


def compared_arguments(arguments: Sequence[str], version: str | None) -> dict[str, str]:
    """The arguments of a command line that all ranks must have equal, as facts: without paths, but with the data's content."""
    given, others = arguments_and_others(arguments, surface_or_nearest(version))
    values = {dest: text_of(argument.value) for dest, argument in given.items() if dest not in _OF_PROCESS}
    values |= {"others": join(others)} if others else {}
    words = [str(word) for dest in DATA if dest in given for word in flattened(given[dest].value)]
    return {f"option {dest}": text for dest, text in values.items() if os.sep not in text} | data_facts(words)


def flattened(value: Any) -> list[Any]:
    """Return the words of an argument's value: itself, or the words of a list."""
    return [word for part in value for word in flattened(part)] if isinstance(value, list | tuple) else [value]


@lru_cache(maxsize=8)
def surface_or_nearest(version: str | None) -> Surface:
    """The arguments of this Megatron, or of the recorded one that is nearest to it, and ours for fields without an option."""
    known = surface(version) if version is not None else None
    return with_field_options(known or surface(recorded_releases("command_line")[0]) or Surface("", ()))


def with_field_options(known: Surface) -> Surface:
    """The arguments of a Megatron-LM and the options of this module that it does not have itself."""
    missing = tuple(argument for argument in FIELD_OPTIONS if known.by_option.keys().isdisjoint(argument.options))
    return replace(known, arguments=(*known.arguments, *missing))


def field_options_in(known: Surface) -> tuple[Argument, ...]:
    """The options among these that are not Megatron-LM's own."""
    return tuple(argument for argument in FIELD_OPTIONS if known.by_option.get(argument.options[0]) is argument)


class _Give(argparse.Action):
    """Stores a `Given`; ``const`` is the value of an option that takes none."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        value = self.const if self.nargs == 0 else values
        setattr(namespace, self.dest, Given(option_string or self.dest, value))


@lru_cache(maxsize=8)
def _parser(known: Surface) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, add_help=False, argument_default=argparse.SUPPRESS, exit_on_error=False
    )
    for argument in known.arguments:
        if argument.options and argument.takes_value:
            kind = KINDS.get(argument.type or "", str)
            parser.add_argument(*argument.options, dest=argument.dest, action=_Give, nargs=argument.nargs, type=kind)
            continue
        for option in argument.options:
            parser.add_argument(option, dest=argument.dest, action=_Give, nargs=0, const=constant(argument, option))
    return parser


def constant(argument: Argument, option: str) -> Any:
    """Return the value of an option that is given without one."""
    if argument.action == "store_const":
        return argument.const
    return not option.startswith("--no-") if argument.action == "boolean_optional" else argument.action != "store_false"
