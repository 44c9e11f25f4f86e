"""Class names of MindSpeed's features: the features of the framework that replace each, or why none is needed or exists."""

from __future__ import annotations

import functools
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from typing import ClassVar, Final

from mindspeed.compat.feature import MindSpeedFeature, OwnFeature
from mindspeed.compat.old_flags.flags import BY_FLAG
from mindspeed.files.tables import fields_of, table_beside

PACKAGE: Final = "mindspeed.features_manager"


@dataclass(frozen=True, slots=True)
class OldClass:
    """Describe a feature class of MindSpeed: its module, its name and level, and the features that replace it.

    ``reason`` says why it stands for no feature. ``flags`` are those that it registers and that no feature of ours has.
    """

    module: str
    name: str
    features: tuple[str, ...] = ()
    reason: str = ""
    level: int = 2
    flags: tuple[str, ...] = ()


CLASSES: Final[dict[str, OldClass]] = {name: OldClass(**fields_of(row)) for name, row in table_beside(__file__).items()}
"""Feature classes of MindSpeed by name."""


class StandIn(OwnFeature):
    """Base of the classes with MindSpeed's names. A consumer may list them, and derive from them to add patches."""

    old: ClassVar[OldClass]

    def __init__(self, feature_name: str = "", optimization_level: int | None = None) -> None:
        level = self.old.level if optimization_level is None else optimization_level
        MindSpeedFeature.__init__(self, feature_name or self.old.name, level)
        self.names = self.old.features

    def register_args(self, parser: ArgumentParser) -> None:
        super().register_args(parser)
        for flag in self.old.flags:
            if flag in BY_FLAG and flag not in parser._option_string_actions:
                kind = "store_true" if BY_FLAG[flag].takes == "nothing" else "store"
                parser.add_argument(flag, action=kind, help=self.old.reason)

    def is_need_apply(self, args: Namespace) -> bool:
        return MindSpeedFeature.is_need_apply(self, args)


@functools.cache
def stand_in(name: str) -> type[StandIn]:
    """Return the class with a name of MindSpeed's. Raises KeyError for other names."""
    old = CLASSES[name]
    does = f"stands for {' and '.join(old.features)}" if old.features else f"has no effect here: {old.reason}"
    entries = {"old": old, "__doc__": f"{name} of MindSpeed {does}.", "__module__": f"{PACKAGE}.{old.module}"}
    return type(name, (StandIn,), entries)


def classes_in(module: str) -> list[str]:
    """Return the class names of a module of MindSpeed's features, or of a package above it."""
    inner = module.removeprefix(PACKAGE).removeprefix(".")
    return [name for name, old in CLASSES.items() if not inner or f"{old.module}.".startswith(f"{inner}.")]
