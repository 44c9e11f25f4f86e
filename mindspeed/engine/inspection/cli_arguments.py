"""The arguments that Megatron-LM's own parser takes, recorded per version: read here without Megatron-LM and without torch.

They are recorded (`mindspeed.engine.inspection.releases`) by `mindspeed.megatron.release_recording`, which builds the parser
of a checkout once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from mindspeed.engine.inspection.releases import recorded_section


@dataclass(frozen=True, slots=True)
class Argument:
    """Describe one argument of the parser in argparse's words.

    ``action`` is the name of argparse's action (``store``, ``store_true``, ``store_false``, ``boolean_optional``), ``type``
    that of the function that converts the text (``int``, ``str``, ``moe_freq_type``) or None. Members of an enumeration
    are their names, as the command line spells them. A positional argument has no ``options``.
    """

    options: tuple[str, ...]
    dest: str
    action: str = "store"
    default: Any = None
    type: str | None = None
    nargs: int | str | None = None
    choices: tuple[Any, ...] | None = None
    const: Any = None
    required: bool = False

    @property
    def takes_value(self) -> bool:
        """Return whether a value follows the option on the command line."""
        return self.action in ("store", "append", "extend") and self.nargs != 0


@dataclass(frozen=True, eq=False)
class Surface:
    """Every argument of one Megatron-LM version, in the parser's order."""

    version: str
    arguments: tuple[Argument, ...]

    @cached_property
    def by_option(self) -> dict[str, Argument]:
        return {option: argument for argument in self.arguments for option in argument.options}

    @cached_property
    def by_dest(self) -> dict[str, list[Argument]]:
        groups: dict[str, list[Argument]] = {}
        for argument in self.arguments:
            groups.setdefault(argument.dest, []).append(argument)
        return groups


@lru_cache(maxsize=8)
def surface(version: str) -> Surface | None:
    """The arguments of Megatron-LM ``version``, or of the recorded release most like it; None when all are above."""
    known = recorded_section(version, "command_line")
    return Surface(known[0], tuple(map(_argument, known[1]))) if known is not None else None


def _argument(row: dict[str, Any]) -> Argument:
    lists = {name: tuple(row[name]) for name in ("options", "choices") if row.get(name) is not None}
    return Argument(**{**row, **lists})
