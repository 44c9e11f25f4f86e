"""An activation plan as text: one screen of it, or all of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from gettext import gettext
from typing import TYPE_CHECKING, Final

from mindspeed.cli.language import reader
from mindspeed.cli.terminal import bold, columns, display_width, fitted, padded, rows_of_cells, wrapped
from mindspeed.problems import CommandLine, Text, localized, marked, on_command_line

if TYPE_CHECKING:
    from mindspeed.engine.planning.plan import ActivationPlan, PlannedPatch
    from mindspeed.engine.resolution.planned_feature import PlannedFeature, PlanNote, Reason

_NOTES: Final = {
    "warning": marked("warnings"),
    "choice": marked("choices"),
    "disabled": marked("disabled"),
    "left-out": marked("left out"),
    "not-checked": marked("not checked"),
    "prepared-first": marked("prepared first"),
    "note": marked("notes"),
}
_KINDS: Final = {
    "not-checked": marked("not checked"),
    "prepared-first": marked("prepared first"),
    "choice": marked("choice"),
    "warning": marked("warning"),
}
"""Notes that a check prints, with the word that begins their lines."""
_WHOLE: Final = ("warning", "choice", "disabled", "not-checked", "prepared-first")
"""Kinds of notes that one screen shows whole; others have one line each."""
_MOST: Final = 5
"""Lines of one screen for each other kind of notes."""


def as_lines(parts: Iterable[tuple[str, list[str]]]) -> Iterator[str]:
    """The parts of a plan that have lines, indented below their titles; titles are in the reader's language."""
    for title, lines in parts:
        if lines:
            yield bold(localized(title))
            yield from (f"  {line}" for line in lines)


def note_lines(rows: Iterable[PlanNote], words: CommandLine = on_command_line) -> Iterator[str]:
    """Yield a line for each choice and warning, and for each condition that is not checked with the options that it needs."""
    for row in rows:
        if row.kind in _KINDS:
            yield f"{padded(gettext(_KINDS[row.kind]), 11)}  {_about(row.feature, row.line(reader(words)))}"


def verdict(plan: ActivationPlan) -> str:
    """Return the last line of a check that found no problem."""
    names = ", ".join(plan.names) or gettext("no features")
    return gettext("no problems: {names}; plan {digest}").format(names=names, digest=plan.digest)


def brief_lines(plan: ActivationPlan, words: CommandLine = on_command_line) -> Iterator[str]:
    """Yield one screen: where a plan runs, its features and why, changed arguments, skipped parts, the digest."""
    words = reader(words)
    for title, lines in _brief_sections(plan, words):
        if lines:
            yield from map(bold, wrapped(gettext(title)))
            yield from lines
    yield f"{bold(gettext('digest'))} {plan.digest}"
    yield from wrapped(_patch_counts(plan))


def _brief_sections(plan: ActivationPlan, words: CommandLine) -> Iterator[tuple[str, list[str]]]:
    yield marked("for"), [*_wrapped_pairs(plan.environment), *_wrapped_pairs(plan.world.known(), but=("platform", "megatron"))]
    added = [feature.name for feature in plan.features if not (feature.requested or _changed_settings(feature))]
    yield marked("features, in activation order"), list(_brief_features([f for f in plan.features if f.name not in added]))
    yield marked("added by optimization level 1"), wrapped(", ".join(added), "  ") if added else []
    changed = [f"{feature.name}.{line}" for feature in plan.base for line in _changed_settings(feature)]
    yield marked("settings of the base plan"), [line for text in changed for line in wrapped(text, "  ")]
    yield marked("Megatron arguments"), _wrapped_pairs({f"{o.override.argument} =": o.override.value for o in plan.overrides})
    for kind, title in _NOTES.items():
        yield title, list(_brief_notes(plan, kind, words))


def _brief_features(features: Sequence[PlannedFeature]) -> Iterator[str]:
    names = max((len(feature.name) for feature in features), default=0)
    for feature in features:
        reason, *settings = texts = [localized(_brief_reason(feature.why[0])), *_changed_settings(feature)]
        on_one_line = display_width("; ".join(texts)) <= columns() - names - 4
        yield from rows_of_cells([(f"{feature.name:<{names}}", "; ".join(texts) if on_one_line else reason)])
        yield from (part for line in settings if not on_one_line for part in fitted(line, "    "))


def _brief_reason(reason: Reason) -> Text:
    from mindspeed.engine.resolution.planned_feature import ReasonKind

    match reason.kind:
        case ReasonKind.REQUESTED:
            return Text.of("requested")
        case ReasonKind.LEVEL_ONE:
            return Text.of("optimization level 1")
        case ReasonKind.SIZE:
            return Text.of("{size} is {value}", size=reason.name, value=reason.value)
        case _:
            return reason.sentence


def _changed_settings(feature: PlannedFeature) -> list[str]:
    """Return each setting of a feature that is not its default, with its source."""
    settings = {name: value for name, value in feature.settings.items() if value.source != "default"}
    return [f"{name} = {value.value} ({localized(value.source)})" for name, value in settings.items()]


def _brief_notes(plan: ActivationPlan, kind: str, words: CommandLine) -> Iterator[str]:
    """Yield the notes of a kind, features with equal texts on one line. Skipped patches of active features are only counted."""
    features: dict[str, list[str]] = {}
    for row in plan.rows:
        if row.kind == kind and not (kind == "left-out" and row.feature in plan.names):
            features.setdefault(row.text, []).append(row.feature)
    texts = (_about(", ".join(features[text]), words.translate(text)) for text in features)
    lines = list(unknown_lines(plan.rows, words) if kind == "not-checked" else texts)
    shown = len(lines) if kind in _WHOLE else min(len(lines), _MOST)
    yield from (part for line in lines[:shown] for part in wrapped(line, "  "))
    if len(lines) > shown:
        yield "  " + gettext("and {count} more").format(count=len(lines) - shown)


def unknown_lines(rows: Iterable[PlanNote], words: CommandLine = on_command_line) -> Iterator[str]:
    """Yield what is not checked: a line for each feature with the options that it needs, and the text of what needs none."""
    needed: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.kind == "not-checked":
            needed.setdefault(row.feature, {}).update(dict.fromkeys(map(words.option, row.fields)))
    give = gettext("{name}: give {options}")
    yield from (give.format(name=name, options=", ".join(options)) for name, options in needed.items() if options)
    yield from (_about(row.feature, localized(row.text)) for row in rows if row.kind == "not-checked" and not row.fields)


def _about(name: str, text: str) -> str:
    return gettext("{name}: {text}").format(name=name, text=text)


def _wrapped_pairs(values: Mapping[str, object], but: tuple[str, ...] = ()) -> list[str]:
    """Return the pairs in lines of the terminal's width; none is broken between its name and its value."""
    pairs = [f"{name} {value}".replace(" ", "\N{NO-BREAK SPACE}") for name, value in values.items() if name not in but]
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in wrapped(", ".join(pairs), "  ")] if pairs else []


def _patch_counts(plan: ActivationPlan) -> str:
    applied = [planned for planned in plan.patches if not planned.skipped]
    own = Counter(planned.owner for planned in applied if planned.owner in plan.names)
    below = len(applied) - own.total()
    skipped = len(plan.patches) - len(applied)
    template = gettext("{own} patches by {features} features, {base} by the base plan; {skipped} do not apply")
    return template.format(own=own.total(), features=len(own), base=below, skipped=skipped)


def sections(plan: ActivationPlan, every_target: bool = False) -> Iterator[tuple[str, list[str]]]:
    """The whole plan as text: titles with their lines; a section without lines does not apply.

    Without ``every_target`` the targets of the base plan are only counted.
    """
    yield marked("for"), [_pairs(plan.environment), _pairs(plan.world.known(), but=("platform", "megatron"))]
    yield marked("features, in activation order"), [line for feature in plan.features for line in _feature(feature)]
    yield marked("Megatron arguments"), [f"{o.override}  {', '.join(o.owners)}: {o.override.reason}" for o in plan.overrides]
    applied = [planned for planned in plan.patches if not planned.skipped]
    yield marked("patches"), _patches([planned for planned in applied if planned.owner in plan.names])
    words = reader()
    for kind, title in _NOTES.items():
        yield title, [_about(row.feature, row.line(words)) for row in plan.rows if row.kind == kind]
    yield marked("base plan"), [line for feature in plan.base for line in setting_lines(feature)]
    below = [planned for planned in applied if planned.owner not in plan.names]
    yield marked("patches of the base plan"), _patches(below, every_target)
    yield marked("digest"), [plan.digest]


def _pairs(values: Mapping[str, object], but: tuple[str, ...] = ()) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items() if name not in but)


def _feature(feature: PlannedFeature) -> list[str]:
    return [
        f"{feature.name}  ({feature.distribution} {feature.version}, level {feature.level})",
        *("  " + gettext("because  {line}").format(line=line) for line in reason_lines(feature)),
        *("  " + gettext("setting  {line}").format(line=line) for line in setting_lines(feature)),
    ]


def reason_lines(feature: PlannedFeature) -> list[str]:
    """Return a line for each reason of a feature, from the nearest to the request, in the reader's language."""
    return [localized(reason.sentence if reason.feature == feature.name else reason.line) for reason in feature.why]


def setting_lines(feature: PlannedFeature) -> list[str]:
    """A line for each setting of a feature, with its source and what it overrode."""
    overrode = gettext("overrode {value}")
    return [
        f"{feature.name}.{name} = {value.value}  "
        f"({', '.join((localized(value.source), *(overrode.format(value=old) for old in value.overrode)))})"
        for name, value in feature.settings.items()
    ]


def _patches(patches: Sequence[PlannedPatch], every_target: bool = True) -> list[str]:
    """List the patches by owner and reason, as one reason often holds for many targets."""
    groups: dict[tuple[str, str], list[str]] = {}
    for planned in patches:
        moved = f"  defined at {planned.site}" if planned.site != planned.patch.target else ""
        target = f"  {planned.patch.kind} {planned.patch.target}{moved}"
        groups.setdefault((planned.owner, planned.patch.reason), []).append(target)
    if every_target:
        return [line for (owner, reason), targets in groups.items() for line in (f"{owner}: {reason}", *targets)]
    return [f"{owner}: {reason}  ({len(targets)})" for (owner, reason), targets in groups.items()]
