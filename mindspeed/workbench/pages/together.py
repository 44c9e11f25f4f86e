"""Other features and layouts on the page of a feature, by verdicts of the matrix."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

from mindspeed.workbench.pages.markdown import code
from mindspeed.workbench.verification.matrix.cases import FEATURE_LAYOUTS
from mindspeed.workbench.verification.matrix.verdicts import CaseOutcome, CaseResult

_TITLES: Final = {
    CaseOutcome.HOLDS: "Works with",
    CaseOutcome.IDLE: "One of the two features has no effect with",
    CaseOutcome.REFUSED: "Is refused with",
    CaseOutcome.REFUSED_LATE: "Is refused when the ranks start with",
    CaseOutcome.FAILS: "Fails with",
}
_IN_LAYOUTS: Final = {CaseOutcome.HOLDS: "Works in", CaseOutcome.IDLE: "Has no effect in"}
_WITH_REASON: Final = (CaseOutcome.REFUSED, CaseOutcome.REFUSED_LATE, CaseOutcome.FAILS)


def together(name: str, verdicts: Mapping[str, CaseResult]) -> list[str]:
    """Return lines about the pairs and layouts of a feature; none without a verdict about it."""
    results = [result for result in verdicts.values() if name in result.case.features]
    beside = {other: r for r in results if len(r.case.features) == 2 for other in r.case.features if other != name}
    layouts = {result.case.layout: result for result in results if len(result.case.features) == 1}
    if not (beside or layouts):
        return []
    # the page is not about layouts that differ only in who holds a slot of this feature
    layouts = {layout: layouts[layout] for layout in FEATURE_LAYOUTS if layout in layouts}
    link = "Tested with a small model against unmodified Megatron; [the matrix](../matrix.html) shows the differences."
    return ["### Together with other features", "", link, *_paragraphs(beside, linked=True), *_layouts(layouts)]


def _layouts(results: Mapping[str, CaseResult]) -> list[str]:
    if not results:
        return []
    return ["", "### In layouts", *_paragraphs(results, linked=False)]


def _paragraphs(results: Mapping[str, CaseResult], linked: bool) -> list[str]:
    """A paragraph for each outcome: names, or with a reason a list in which names with one reason stand together."""
    lines = []
    for outcome, title in _TITLES.items():
        names = sorted(name for name, result in results.items() if result.outcome is outcome)
        title = title if linked else _IN_LAYOUTS.get(outcome, title.removesuffix(" with"))
        if names and outcome in _WITH_REASON:
            lines += ["", f"{title}:", "", *_reasons(names, results, linked)]
        elif names:
            lines += ["", f"{title}: {_listed(names, linked)}."]
    return lines


def _reasons(names: Iterable[str], results: Mapping[str, CaseResult], linked: bool) -> list[str]:
    by_reason: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        by_reason[f"{results[name].reason} ({results[name].code})"].append(name)
    return [f"- {_listed(some, linked)}: {reason}" for reason, some in by_reason.items()]


def _listed(names: Iterable[str], linked: bool) -> str:
    return ", ".join(f"[{name}]({name}.md)" if linked else code(name) for name in names)
