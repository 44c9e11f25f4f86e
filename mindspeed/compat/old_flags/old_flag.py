"""A flag of MindSpeed that maps to a feature."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

TYPES: Final[dict[str, type]] = {"int": int, "float": float, "text": str}


@dataclass(frozen=True, slots=True)
class OldFlag:
    """Describe a flag of MindSpeed.

    ``feature`` is what it stands for; with ``choices`` the value chooses it (``{value: feature}``), or the value of the
    flag ``chooser``, the first if that is not given. ``setting`` is the setting that takes the value. A flag that does not
    ``switch`` only gives a setting. ``off`` are values that leave the feature off, as MindSpeed's defaults do. ``noop_reason``:
    why nothing is to be done for what the flag asks. ``size``: the parallel size of Megatron that must be above 1 for it.
    """

    flag: str
    feature: str = ""
    setting: str = ""
    takes: Literal["nothing", "int", "float", "text"] = "nothing"
    switch: bool = True
    off: tuple[Any, ...] = ()
    choices: Mapping[str, str] = field(default_factory=dict)
    chooser: str = ""
    noop_reason: str = ""
    size: str = ""

    @property
    def dest(self) -> str:
        """The attribute that MindSpeed's features read."""
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def features(self) -> tuple[str, ...]:
        """Every feature that this flag can map to."""
        return tuple(dict.fromkeys(self.choices.values())) or (self.feature,)

    def new_spelling(self, feature: str, value: Any = True) -> str:
        """Spell the new option: ``--features rms-norm``, or ``--set ring-attention.window=2``."""
        setting = f"--set {feature}.{self.setting}={str(value).lower() if value is True else value}" if self.setting else ""
        return " ".join(filter(None, [f"--features {feature}" if self.switch else "", setting]))

    def says_something(self, value: Any) -> bool:
        """Return whether a value has an effect: a setting may be 0, but a switch that counts is then off."""
        return value is not None and value is not False and not (self.switch and value == 0)

    def feature_for(self, value: Any, values: Mapping[str, Any]) -> str:
        """The feature that a value maps to; ``values`` are all arguments by attribute. ``""`` for none."""
        if value in self.off:
            return ""
        if not self.choices:
            return self.feature
        key = values.get(self.chooser.removeprefix("--").replace("-", "_")) if self.chooser else value
        return next(iter(self.choices.values())) if key is None else self.choices.get(str(key), "")
