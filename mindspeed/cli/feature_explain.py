"""``mindspeed features explain``: why a feature is on, or why it is not, and everything that it does in a job."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from gettext import gettext
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import click

from mindspeed.cli.explain import show_code
from mindspeed.cli.language import reader
from mindspeed.cli.output import json_option, print_result
from mindspeed.cli.plan_text import as_lines, reason_lines, setting_lines
from mindspeed.cli.request_options import JobCommand, Request, request_options, unknown_feature
from mindspeed.plugins.found import declared_at
from mindspeed.problems import Text, localized, marked

if TYPE_CHECKING:
    from mindspeed.engine.planning.explanation import Explanation
    from mindspeed.engine.planning.plan import ActivationPlan
    from mindspeed.plugins.discovery import Catalog, DiscoveredFeature
    from mindspeed.plugins.feature import FeatureSpec

_CODE: Final = re.compile(r"MS\d{3}", re.IGNORECASE)
Sections = Iterator[tuple[str, list[str]]]


@click.command(cls=JobCommand)
@click.argument("name", metavar="NAME|CODE")
@request_options
@json_option
def explain(request: Request, name: str) -> None:
    """Explain a feature in a job, or an error code.

    For an active feature: why it is active, its position in the activation order, and the source of every setting. Its
    patches are listed with target and replacement. For an inactive feature: why it is inactive, and what would switch it
    on.
    """
    if _CODE.fullmatch(name):
        show_code(name)
        return
    explain_in_plan(request.plan_of_run(), name, request)


def explain_in_plan(plan: ActivationPlan, name: str, request: Request) -> None:
    """Print why a feature is active in the plan of a ``request``, or why it is not and what it would add."""
    from mindspeed.engine.resolution.request import spelled
    from mindspeed.registry import catalog_for

    name = spelled(name)
    known = catalog_for([*plan.names, name])
    if name in {feature.name for feature in (*plan.base, *plan.features)}:
        _explain_active(plan, known, name)
    else:
        _explain_inactive(request, plan, known, name)


def _explain_active(plan: ActivationPlan, known: Catalog, name: str) -> None:
    from mindspeed.engine.planning.explanation import explain as explain_feature
    from mindspeed.registry import base_features

    features = {feature.spec.name: feature for feature in base_features(plan.environment["platform"])}
    features |= {other: known.feature(other) for other in plan.names}
    explanation, count = explain_feature(plan, features, name), len(plan.base) + len(plan.features)
    lines = as_lines(_active(explanation, features[name], count))
    summary = localized(features[name].summary())
    first = gettext("{name} is on: {summary}").format(name=name, summary=summary)
    print_result(_active_json(explanation, features[name], count), [first, *lines])


def _active(explanation: Explanation, feature: Any, count: int) -> Sections:
    planned = explanation.feature
    yield marked("from"), [f"{planned.distribution} {planned.version}, {declared_at(feature)}", *_traits(feature.spec)]
    yield marked("why"), reason_lines(planned)
    free = gettext("no order to another active feature is declared; ties are sorted by name")
    yield (
        Text.of("position {number} of {count}", number=explanation.number, count=count),
        [str(edge) for edge in explanation.edges] or [free],
    )
    settings = zip(setting_lines(planned), planned.settings, strict=True)
    described = [(line, f"  {localized(feature.Args.model_fields[key].description or '')}") for line, key in settings]
    yield marked("settings"), list(chain.from_iterable(described))
    yield marked("slots"), list(planned.slots)
    yield marked("Megatron arguments"), [f"{o.override}  {o.override.reason}" for o in explanation.overrides]
    yield marked("patches"), [line for patch in explanation.patches for line in _patch(patch)]
    words = reader()
    yield marked("notes"), [row.line(words) for row in explanation.rows if row.kind != "left-out"]


def _traits(spec: FeatureSpec) -> list[str]:
    numerics = spec.numerics
    claim = numerics.claim if numerics.claim == "exact" else f"{numerics.claim} (loss {numerics.loss:g}, {numerics.reason})"
    template = gettext("category {category}, level {level}, {stability}; numerics {claim}")
    stability = spec.stability.value
    return [template.format(category=spec.category.value, level=spec.level, stability=stability, claim=claim)]


def _patch(explained: Any) -> list[str]:
    patch = explained.patch.patch
    lines = [f"{patch.kind} {patch.target}", f"  because  {patch.reason}", f"  target   {explained.target}"]
    if explained.code is not None:
        lines.append(f"  code     {explained.code}")
    if explained.patch.skipped:
        return [*lines, f"  left out: {explained.patch.skipped}"]
    return [*lines, f"  at site  {' <- '.join(explained.chain)}"]


def _active_json(explanation: Explanation, feature: Any, count: int) -> dict[str, Any]:
    spec, planned = feature.spec, explanation.feature.to_json()
    name = planned.pop("name")
    for key, setting in planned["settings"].items():
        setting["description"] = feature.Args.model_fields[key].description
    return {
        "feature": name,
        "active": True,
        "summary": feature.summary(),
        "where": declared_at(feature),
        "category": spec.category.value,
        "stability": spec.stability.value,
        "numerics": asdict(spec.numerics),
        **planned,
        "position": {"number": explanation.number, "of": count, "edges": [edge._asdict() for edge in explanation.edges]},
        "overrides": [{"owners": o.owners, **o.override.to_json()} for o in explanation.overrides],
        "patches": [
            asdict(explained) | {"patch": explained.patch.patch.to_json(), "skipped": explained.patch.skipped}
            for explained in explanation.patches
        ],
        "rows": [row.to_json() for row in explanation.rows],
    }


def _explain_inactive(request: Request, plan: ActivationPlan, known: Catalog, name: str) -> None:
    from mindspeed.problems import Problem, ResolutionError

    row = next((row for row in known.rows if row.name == name), None)
    if row is None:
        raise ResolutionError([unknown_feature(known, name)])
    because, brings, problems = _why_not(plan, known, row), list[str](), list[Problem]()
    if name not in {row.feature for row in plan.rows if row.kind == "disabled"}:
        try:
            with_it = request.plan_of_run((name,))
            brings = [other for other in with_it.names if other not in plan.names and other != name]
        except ResolutionError as error:
            problems = list(error.problems)
    spec = row.feature.spec if row.feature is not None else None
    ways = _ways(row, spec)
    about = {"feature": name, "distribution": row.distribution, "version": row.version, "where": row.where}
    words = reader()
    off = {"because": because, "switched_on_by": ways, "brings": brings, "problems": [p.to_json() for p in problems]}
    sections = [
        (marked("from"), [row.where, *(_traits(spec) if spec else [])]),
        (marked("why not"), [*map(localized, because)]),
        (marked("switched on by"), ways),
        (marked("it would add"), brings),
        (marked("result of requesting it"), [line for problem in problems for line in problem.text(words).splitlines()]),
    ]
    summary = row.feature.summary() if row.feature is not None else None
    first = gettext("{name} is not active").format(name=name)
    first = gettext("{name}: {text}").format(name=first, text=localized(summary)) if summary else first
    lines = [first, *as_lines(sections)]
    print_result({**about, "active": False, "summary": summary, "off": off}, lines)


def _why_not(plan: ActivationPlan, known: Catalog, row: DiscoveredFeature) -> list[str]:
    lines = [planned.text for planned in plan.rows if planned.feature == row.name and planned.kind != "not-checked"]
    if row.problem is not None:
        lines.append(row.problem.message)
    if row.name in known.specs:
        spec, platform = known.specs[row.name], plan.environment["platform"]
        if spec.platforms and platform not in spec.platforms:
            others = ", ".join(sorted(spec.platforms))
            lines.append(Text.of("it runs only on {others}, but this plan is for {platform}", others=others, platform=platform))
        if spec.level > plan.level:
            lines.append(
                Text.of(
                    "its optimization level is {level}, but the level of this job is {allowed}",
                    level=spec.level,
                    allowed=plan.level,
                )
            )
        for size in spec.sizes:
            if plan.world.knows(size) and getattr(plan.world, size) == 1:
                lines.append(Text.of("the {size} size is 1", size=size))
    return lines or [marked("not requested, and not required by any active feature")]


def _ways(row: DiscoveredFeature, spec: FeatureSpec | None) -> list[str]:
    if row.problem is not None:
        return [row.problem.fix_text]
    sizes = [f"--{size} N, N above 1" for size in (spec.sizes if spec else ()) if size != "dp"]
    return [*sizes, f"--features {row.name}"]
