"""The picture of the table of measured effects on the first page: what a feature leaves of time or bytes."""

from __future__ import annotations

import re
from typing import Final

from mindspeed.workbench.pictures.drawing import Picture
from tools.docs.drawing import Shares

HEADING: Final = "## Measured effects"
_ROW: Final = re.compile(r"^\| \[([a-z0-9-]+)\]\([^)]*\) \| ([^|]+) \|", re.MULTILINE)
_PERCENT: Final = re.compile(r"([\d.]+) % ")
_OF: Final = re.compile(r"(0\.\d+) of ")
_INSTEAD: Final = re.compile(r"([\d,]+) instead of ([\d,]+) ")


def effects_picture(page: str) -> Picture:
    """Draw the table of a page. Raises ValueError for an effect that is not a share."""
    table = page.partition(HEADING)[2].partition("\n## ")[0]
    rows = [(name, share_of(effect), effect) for name, effect in _ROW.findall(table)]
    text = "Each bar is what is left with the feature; the dashed box is the same without it."
    return Picture(
        "effects", "Measured effects of features", text, ((Shares("with the feature, of the whole without it", rows),),)
    )


def share_of(effect: str) -> float:
    """Return the share that a sentence gives: ``0.64 of the time``, ``3 instead of 4 bytes`` or ``1 % of the time``."""
    if found := _INSTEAD.search(effect):
        with_feature, without = (int(number.replace(",", "")) for number in found.groups())
        return with_feature / without
    if found := _PERCENT.search(effect):
        return float(found[1]) / 100
    if found := _OF.search(effect):
        return float(found[1])
    raise ValueError(f"no share in {effect!r}")
