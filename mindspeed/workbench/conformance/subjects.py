"""Select the features under test: those of a distribution, or one feature, each with a plan in which it acts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mindspeed.engine.planning.plan import ActivationPlan, PlannedPatch
from mindspeed.plugins.discovery import Catalog, DiscoveredFeature
from mindspeed.problems import MindSpeedError, Problem, ResolutionError, advice, near_names, suggestion
from mindspeed.registry import catalog
from mindspeed.workbench.verification.case import build_case


@dataclass(frozen=True, slots=True)
class Subject:
    """Describe a feature under test; ``plan`` is the smallest job that suits it, None with ``problems`` when there is none."""

    row: DiscoveredFeature
    known: Catalog
    plan: ActivationPlan | None
    problems: tuple[Problem, ...] = ()

    @property
    def name(self) -> str:
        return self.row.name

    @property
    def feature(self) -> Any:
        """The feature's class. Only of a row that has loaded."""
        return self.known.feature(self.name)

    @property
    def patches(self) -> list[PlannedPatch]:
        """The patches of the feature, including those that a guard skips here."""
        return [planned for planned in self.plan.patches if planned.owner == self.name] if self.plan is not None else []


def subjects(name: str) -> list[Subject]:
    """Pair the result of `rows_of` with plans in which the features act."""
    known = catalog()
    return [_subject(row, known) for row in rows_of(name)]


def rows_of(name: str) -> list[DiscoveredFeature]:
    """The features of the distribution ``name``, else the feature of that name. Raises ResolutionError (MS201) for neither."""
    known = catalog()
    plain = name.replace("_", "-").lower()
    rows = [row for row in known.rows if row.distribution.replace("_", "-").lower() == plain]
    rows = rows or [row for row in known.rows if row.name == name]
    if not rows:
        names = {row.distribution for row in known.rows} | {row.name for row in known.rows}
        fix = suggestion(near_names(name, names), "install it first: pip install -e .")
        text = f"{name!r} is neither a feature nor an installed package with features"
        raise ResolutionError([Problem("MS201", text, (name,), fix=advice(fix))])
    return rows


def _subject(row: DiscoveredFeature, known: Catalog) -> Subject:
    if row.problem is not None:
        return Subject(row, known, None, (row.problem,))
    try:
        return Subject(row, known, build_case([row.name]).plan)
    except MindSpeedError as error:
        return Subject(row, known, None, error.problems)
