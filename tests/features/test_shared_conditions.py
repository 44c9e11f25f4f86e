"""Conditions that features share are proven by the tests of one of them, or of their library; the others declare them."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from mindspeed.plugins.conditions import Condition, ModelCondition, conditions
from tests.features.resolving import CATALOG


def declared() -> dict[str, list[str]]:
    """Return the features that declare each shared condition, by the condition's sentence."""
    found: dict[Condition | ModelCondition, list[str]] = defaultdict(list)
    for name in sorted(CATALOG.usable):
        constraints = CATALOG.feature(name).spec.constraints
        for one in [*conditions(constraints), *(one for one in constraints if isinstance(one, ModelCondition))]:
            found[one].append(name)
    return {one.message: names for one, names in found.items() if len(names) > 1}


def test_features_declare_the_shared_conditions() -> None:
    blocks = Path(__file__).with_name("shared_conditions.txt").read_text().split("\n\n")
    expected = {message: names.split() for message, names in (block.strip().split("\n") for block in blocks)}
    assert declared() == expected
