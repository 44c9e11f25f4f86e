"""Follow a Megatron release: what differs from the last one, which claims hold on it, which bugs it has, as one report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mindspeed.engine.planning.drift import DriftRow, source_tree
from mindspeed.engine.planning.targets import PatchTarget
from mindspeed.plugins.feature import FeatureSpec
from mindspeed.problems import MindSpeedError
from mindspeed.workbench.diagnostics.release_comparison import CHANGED, compare_releases
from mindspeed.workbench.verification.bugs_on_checkout import bugs_on, wrong
from mindspeed.workbench.verification.claims_on_checkout import OUT_OF_RANGE, Limits, in_order, verify_on

Recorder = Callable[[Any, Sequence[PatchTarget], Path], Path]
"""``record_release`` of `mindspeed.megatron.release_recording`."""

FAILED: Final = ("changed", "gone")
_ORDER: Final = ("gone", "changed", "body changed", "appended", "new", "same")


@dataclass(frozen=True, slots=True)
class Report:
    """The findings of one release: rows of targets, overlaps ``(feature, new argument)``, claims, known bugs, notes."""

    version: str
    since: str
    comparisons: Sequence[DriftRow]
    overlaps: Sequence[tuple[str, str]]
    claims: Sequence[Mapping[str, Any]]
    bugs: Sequence[Mapping[str, Any]] = ()
    notes: Sequence[str] = ()

    @property
    def holds(self) -> bool:
        """Return whether no target is changed or gone, every claim for this release holds, and it has the bugs of its rows."""
        return not any(row.verdict in FAILED for row in self.comparisons) and not self.failed and not wrong(self.bugs)

    @property
    def failed(self) -> list[str]:
        """Name the features that have a claim here which was not seen to hold."""
        return [row["feature"] for row in self.claims if not row["holds"] and row.get("open") != OUT_OF_RANGE]

    def to_json(self) -> dict[str, Any]:
        fields = ("feature", "target", "verdict", "why", "near", "diff")
        return {
            "megatron": self.version,
            "since": self.since,
            "targets": [{name: getattr(row, name) for name in fields} for row in self.comparisons],
            "overlaps": [{"feature": feature, "argument": argument} for feature, argument in self.overlaps],
            "claims": list(self.claims),
            "bugs": list(self.bugs),
            "notes": list(self.notes),
        }


def follow(
    checkout: Path,
    since: str | None,
    targets: Sequence[PatchTarget],
    specs: Mapping[str, FeatureSpec],
    record: Recorder,
    into: Path,
    claims: Iterable[str] = (),
    limits: Limits | None = None,
) -> Report:
    """Compare ``checkout`` with ``since``, and record it below ``into``. With ``claims`` verify those of these features on it,
    and run the tests of known bugs."""
    declared = {name: [flag.dest for flag in spec.megatron_flags] for name, spec in specs.items()}
    version, before, comparisons, overlaps = compare_releases(targets, declared, checkout, since)
    notes = []
    try:
        with source_tree(checkout) as tree:
            record(tree, targets, into)
    except MindSpeedError as error:
        notes += [str(problem) for problem in error.problems]
    if not any(row.diff for row in comparisons) and any(row.verdict == "body changed" for row in comparisons):
        notes.append(f"the diffs need the sources of {before}: --since CHECKOUT")
    verdicts: dict[str, list[str]] = {}
    for row in comparisons:
        verdicts.setdefault(row.feature, []).append(row.verdict)
    verified = {name: specs[name] for name in in_order(claims, verdicts)}
    limits = limits or Limits()
    rows = verify_on(checkout, version, verified, limits) if verified else []
    bugs = []
    try:
        bugs = bugs_on(checkout, version, limits.total) if verified else []
    except MindSpeedError as error:
        notes += [str(problem) for problem in error.problems]
    return Report(version, before, comparisons, overlaps, rows, bugs, notes)


def markdown(report: Report) -> str:
    """The report as a Markdown page."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    yield f"# megatron-core {report.version}, against {report.since}\n"
    yield f"Targets of patches: {_counted(row.verdict for row in report.comparisons)}.\n"
    yield from (f"- {note}" for note in report.notes)
    yield "\n## Features\n"
    yield "| feature | claim | targets |\n|---|---|---|"
    claims = {row["feature"]: row for row in report.claims}
    for name in sorted({row.feature for row in report.comparisons} | set(claims)):
        verdicts = _counted(row.verdict for row in report.comparisons if row.feature == name)
        yield f"| {name} | {_claim(claims.get(name))} | {verdicts or 'no target'} |"
    if report.bugs:
        yield "\n## Known bugs\n"
        yield "| bug | verdict | seen |\n|---|---|---|"
        yield from (f"| {row['bug']} | {row['verdict']} | {row['seen']} |" for row in report.bugs)
    if report.overlaps:
        yield "\n## New arguments of Megatron that look like a feature\n"
        yield from (f"- `{argument}`: {feature}" for feature, argument in report.overlaps)
    yield "\n## Targets that differ\n"
    owners: dict[str, list[str]] = {}
    for row in report.comparisons:
        owners.setdefault(row.target, []).append(row.feature)
    different = {row.target: row for row in report.comparisons if row.verdict in CHANGED}
    for row in sorted(different.values(), key=lambda row: (_ORDER.index(row.verdict), row.target)):
        yield from _target_lines(row, owners[row.target])
    failed = [row for row in report.claims if row["problems"]]
    if failed:
        yield "## Problems of claims\n"
    for claim in failed:
        yield f"### {claim['feature']}\n"
        yield "```\n" + "\n".join(claim["problems"]) + "\n```\n"


def _target_lines(row: DriftRow, owners: Sequence[str]) -> Iterator[str]:
    yield f"### {row.verdict}: `{row.target}`\n"
    yield ", ".join(owners) + (f": {row.why}" if row.why else "") + "\n"
    if row.near:
        yield "near names: " + ", ".join(f"`{name}`" for name in row.near) + "\n"
    if row.diff:
        yield f"```diff\n{row.diff}\n```\n"


def _counted(verdicts: Iterable[str]) -> str:
    counts = Counter(verdicts)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in (*_ORDER, "not recorded") if counts[verdict])


def _claim(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "not verified"
    if row["holds"] is None:
        return str(row["problems"][0]) if "open" in row else "refused"
    return f"holds ({row['seconds']:.0f} s)" if row["holds"] else "does not hold"
