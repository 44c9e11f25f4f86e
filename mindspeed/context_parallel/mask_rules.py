"""Rules of the keys that a query attends to: ours, and those that packages add by an entry point. Light."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from mindspeed.plugins.extensions import Extension, extensions

RULES: Final = ("causal", "sliding-window", "prefix")
MASKS: Final = "mindspeed.masks"
"""Entry-point group of masks: functions of the number of tokens, which return a mask [tokens, tokens], True = hidden."""


@dataclass(frozen=True, slots=True)
class MaskRule:
    """``kind`` is causal, sliding-window, prefix, or the name of a mask that a package adds.

    A window's ``width`` counts the query itself. Tokens before ``prefix`` are seen by all.
    """

    kind: str = "causal"
    width: int | None = None
    prefix: int | None = None

    @property
    def is_own(self) -> bool:
        """True where a function of a package makes the mask."""
        return self.kind not in RULES


def own_masks() -> dict[str, Extension]:
    """Find the masks of the packages that MINDSPEED_PLUGINS allows, by name."""
    return {mask.name: mask for mask in extensions(MASKS) if mask.name not in RULES}
