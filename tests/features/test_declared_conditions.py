"""Which fields of a job each feature refuses, and the conditions that several features share.

A line of the text files is the sentence of a condition; the indented one after it, the features that declare it. Each refusal
of a field is provoked in the job of the feature's own verification; other conditions are proven by the tests of one feature.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from mindspeed.job.world import FIELDS
from mindspeed.plugins.conditions import Condition, ModelCondition, conditions
from tests.engine.test_one_answer import by_plan, surroundings
from tests.features.resolving import CATALOG


def field_of(one: Condition | ModelCondition) -> str:
    """Return the field of the job that may not be set; empty for a condition of another kind."""
    refuses = isinstance(one, Condition) and one.when is None and one.otherwise != "idle"
    name = one.name.removeprefix("no_") if refuses else ""
    return name if name in FIELDS else ""


def declared() -> dict[Condition | ModelCondition, list[str]]:
    """Return the features that declare each condition."""
    found: dict[Condition | ModelCondition, list[str]] = defaultdict(list)
    for name in sorted(CATALOG.usable):
        constraints = CATALOG.feature(name).spec.constraints
        for one in [*conditions(constraints), *(one for one in constraints if isinstance(one, ModelCondition))]:
            found[one].append(name)
    return found


def rows(file: str) -> dict[str, list[str]]:
    """Return the features of each sentence."""
    lines = Path(__file__).with_name(file).read_text().splitlines()
    return {sentence: names.split() for sentence, names in zip(lines[::2], lines[1::2], strict=True)}


REFUSED = rows("refused_fields.txt")


def test_features_refuse_these_fields_and_share_these_conditions() -> None:
    fields = {f"{field_of(one)}: {one.message}": names for one, names in declared().items() if field_of(one)}
    shared = {one.message: names for one, names in declared().items() if not field_of(one) and len(names) > 1}
    assert (fields, shared) == (REFUSED, rows("shared_conditions.txt"))


@pytest.mark.parametrize("row", REFUSED)
def test_a_job_with_a_field_that_a_feature_does_not_support_is_refused(row: str) -> None:
    field, _, sentence = row.partition(": ")
    kind = FIELDS[field].kind
    value = kind(8) if kind in (int, float) else True
    for name in REFUSED[row]:
        text = sentence.replace("{feature}", name).replace(f"{{world.{field}}}", str(value))
        layer = surroundings(CATALOG.feature(name))
        assert by_plan(layer, {field: kind(0)}, name) == set()
        assert by_plan(layer, {field: value}, name) == {f"{name}: {text}"}
