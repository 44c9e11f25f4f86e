"""MegatronFlag: the meaning of an argument of Megatron-LM for a feature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class MegatronFlag:
    """An argument of Megatron-LM, by the attribute that its parser gives it (``recompute_method``).

    ``setting`` is the setting of the feature that has its value, after ``convert``; it counts where the feature is active. A
    value outside ``takes``, or a list with one, is left to Megatron. With ``follows_default`` Megatron's default counts too.
    ``switch`` is on for an argument that requests the feature and off for one that removes it; only with one of ``values``
    where these are given, and only where the parallel size ``size`` is above one. Features that are switched on by different
    values of one argument hold one slot, and a holder that is requested by name wins.
    """

    dest: str
    setting: str = ""
    switch: Literal["", "on", "off"] = ""
    values: tuple[Any, ...] = ()
    size: str = ""
    takes: tuple[Any, ...] = ()
    follows_default: bool = False
    convert: Callable[[Any], Any] | None = None

    @property
    def is_choice(self) -> bool:
        """Return whether the value of the argument decides which feature it switches on."""
        return self.switch == "on" and bool(self.values)
