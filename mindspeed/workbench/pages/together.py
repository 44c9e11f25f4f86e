"""Other features and layouts on the page of a feature, by verdicts of the matrix."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

from mindspeed.workbench.pages.markdown import code, table
from mindspeed.workbench.verification.matrix.cases import FEATURE_LAYOUTS
from mindspeed.workbench.verification.matrix.verdicts import CaseOutcome, CaseResult

_TITLES: Final = {
    CaseOutcome.HOLDS: "works",
    CaseOutcome.IDLE: "one has no effect",
    CaseOutcome.REFUSED: "refused",
    CaseOutcome.REFUSED_LATE: "refused by the ranks",
    CaseOutcome.FAILS: "fails",
}
_WITH_REASON: Final = (CaseOutcome.REFUSED, CaseOutcome.REFUSED_LATE, CaseOutcome.FAILS)


def together(name: str, verdicts: Mapping[str, CaseResult], categories: Mapping[str, str]) -> list[str]:
    """Return the part of the matrix that is about a feature: other features by category, and layouts.

    It is empty without a verdict about the feature.
    """
    results = [result for result in verdicts.values() if name in result.case.features]
    beside = {other: r for r in results if len(r.case.features) == 2 for other in r.case.features if other != name}
    layouts = {result.case.layout: result for result in results if len(result.case.features) == 1}
    if not (beside or layouts):
        return []
    # the page is not about layouts that differ only in who holds a slot of this feature
    layouts = {layout: layouts[layout] for layout in FEATURE_LAYOUTS if layout in layouts}
    shown = [outcome for outcome in _TITLES if any(r.outcome is outcome for r in (*beside.values(), *layouts.values()))]
    rows = [
        (category, *(_listed(names[outcome], linked=True) for outcome in shown))
        for category, names in _by_category(beside, categories).items()
    ]
    if layouts:
        by_outcome = [[layout for layout, r in layouts.items() if r.outcome is outcome] for outcome in shown]
        rows.append(("layouts", *(_listed(names, linked=False) for names in by_outcome)))
    link = "Tested with a small model against unmodified Megatron; [the matrix](../matrix.html) has all features."
    reasons = [*_reasons(beside, linked=True), *_reasons(layouts, linked=False)]
    return [
        *("### Together with other features", "", link, ""),
        *table(("", *(_TITLES[outcome] for outcome in shown)), rows),
        *(("", "Reasons:", "", *reasons) if reasons else ()),
    ]


def _by_category(
    results: Mapping[str, CaseResult], categories: Mapping[str, str]
) -> dict[str, defaultdict[CaseOutcome, list[str]]]:
    """Return the names of features by category and outcome."""
    found: dict[str, defaultdict[CaseOutcome, list[str]]] = {}
    for name in sorted(results, key=lambda name: (categories.get(name, ""), name)):
        found.setdefault(categories.get(name, ""), defaultdict(list))[results[name].outcome].append(name)
    return found


def _reasons(results: Mapping[str, CaseResult], linked: bool) -> list[str]:
    """Return a line for each reason with the names that have it."""
    by_reason: defaultdict[str, list[str]] = defaultdict(list)
    for name in sorted(results):
        if results[name].outcome in _WITH_REASON:
            by_reason[f"{results[name].reason} ({results[name].code})"].append(name)
    return [f"- {_listed(some, linked)}: {reason}" for reason, some in by_reason.items()]


def _listed(names: Iterable[str], linked: bool) -> str:
    return ", ".join(f"[{name}]({name}.md)" if linked else code(name) for name in names)
