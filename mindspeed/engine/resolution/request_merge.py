"""Merging the sources of a request: settings, world sizes and switches, each value with its origin."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from mindspeed.engine.resolution.environment import Environment
from mindspeed.engine.resolution.planned_feature import PlanNote, Value
from mindspeed.engine.resolution.request import Layer
from mindspeed.job.fact import MOST, Field
from mindspeed.job.hybrid_pattern import facts_of_pattern
from mindspeed.job.world import FIELDS, World, size_name
from mindspeed.plugins.discovery import Catalog
from mindspeed.problems import Fix, GivenValue, Problem, Text, brief, near_names, renames

Settings = dict[str, dict[str, Value]]
LAUNCH: Final = "WORLD_SIZE"
"""Source of the number of processes that a launcher starts."""


@dataclass(slots=True)
class MergedRequest:
    """The request after merging: one value per setting and size, and what was wrong with the sources.

    ``requested``, ``without`` and ``disabled`` map names to their first layer, ``withdrawn`` those that a higher layer removes.
    ``spelled_as_settings`` has the feature and the setting of parallel sizes whose highest source gives the setting alone.
    """

    requested: dict[str, Layer] = field(default_factory=dict)
    settings: Settings = field(default_factory=dict)
    world: dict[str, Value] = field(default_factory=dict)
    without: dict[str, Layer] = field(default_factory=dict)
    withdrawn: dict[str, Layer] = field(default_factory=dict)
    disabled: dict[str, Layer] = field(default_factory=dict)
    spelled_as_settings: set[tuple[str, str]] = field(default_factory=set)
    notes: list[PlanNote] = field(default_factory=list)
    level: int = 2
    strict: bool = False
    only: bool = False
    problems: list[Problem] = field(default_factory=list)

    def removal(self, name: str) -> tuple[str, str] | None:
        """Return the code and the source of the removal of a feature; None for one that may be active."""
        for code, removed in (("MS211", self.disabled), ("MS210", self.without)):
            if name in removed:
                return code, removed[name].source
        return None

    def as_world(self) -> World:
        return World({name: value.value for name, value in self.world.items()})


def merge(layers: Sequence[Layer], catalog: Catalog, environment: Environment) -> MergedRequest:
    """Fold the layers, low to high."""
    merged = MergedRequest()
    merged.world["platform"] = Value(environment.platform, environment.source)
    if environment.megatron is not None:
        merged.world["megatron"] = Value(environment.megatron, environment.source)
    if environment.world_size is not None:
        merged.world["world_size"] = Value(environment.world_size, LAUNCH)
    if environment.engine:
        merged.world["engine_installed"] = Value(True, environment.source)
    for number, layer in enumerate(layers, 1):
        if (sizes := _range_of(layer.world.get("world_size"))) is not None:
            merged.problems += _outside(sizes, environment.world_size, layer.source)
            layer = replace(layer, world={name: value for name, value in layer.world.items() if name != "world_size"})
        merged.notes += [note for note in layer.notes if note not in merged.notes]
        merged.problems += layer.problems
        for name in layer.without:
            if name in merged.requested and not merged.requested[name].option:
                merged.withdrawn[name] = merged.requested.pop(name)
            _remove_sizes(merged, catalog, name, layer.source)
        for name in layer.features:
            merged.requested.setdefault(name, layer)
        for name in layer.without:
            merged.without.setdefault(name, layer)
        for name in layer.disabled:
            merged.disabled.setdefault(name, layer)
        merged.level = layer.level if layer.level is not None else merged.level
        merged.strict = layer.strict if layer.strict is not None else merged.strict
        merged.only = layer.only if layer.only is not None else merged.only
        overridden = {name for higher in layers[number:] for name, value in higher.world.items() if value is not None}
        world, settings = _unify_size_spellings(layer, overridden, catalog, merged.problems)
        for name, value in world.items():
            if name == "world_size" and environment.world_size not in (None, value):
                text = f"{layer.source} sets world size {value}, but the job of this process has {environment.world_size} ranks"
                fix = (Fix.drop_field(name, layer.source), Fix.advise(f"start {value} processes"))
                merged.problems.append(Problem("MS306", text, where=LAUNCH, fix=fix))
            _put(merged.world, name, value, layer)
        for size, (feature, setting) in catalog.owners.items():
            if setting is not None and size in world:
                given = (feature, setting)
                (merged.spelled_as_settings.discard if size in layer.world else merged.spelled_as_settings.add)(given)
        for feature, fields in settings.items():
            for name, value in fields.items():
                _put(merged.settings.setdefault(feature, {}), name, value, layer)
    _put_facts_of_pattern(merged, catalog)
    if merged.level not in (0, 1, 2):
        merged.problems.append(
            Problem(
                "MS301", f"optimization level {merged.level} is not 0, 1 or 2", fix=Fix.give_option("--optimization-level", 2)
            )
        )
        merged.level = 2
    return merged


def _range_of(value: object) -> range | None:
    """Return the numbers of processes of an elastic job, ``"2-8"``; None for another value."""
    first, _, last = value.partition("-") if isinstance(value, str) else ("", "", "")
    return range(int(first), int(last) + 1) if first.isdigit() and last.isdigit() else None


def _outside(sizes: range, found: int | None, source: str) -> list[Problem]:
    """MS306 for a job with a number of processes that its range does not have."""
    if found is None or found in sizes:
        return []
    text = f"{source} allows {sizes.start} to {sizes.stop - 1} processes, but the job of this process has {found} ranks"
    fix = Fix.advise(f"start {sizes.start} to {sizes.stop - 1} processes, or change world_size in the job file")
    return [Problem("MS306", text, where=LAUNCH, fix=(fix,))]


def _put_facts_of_pattern(merged: MergedRequest, catalog: Catalog) -> None:
    """Add what the pattern of a hybrid model says of the job, where no source does."""
    if (pattern := merged.world.get("hybrid_layer_pattern")) is None or not pattern.value:
        return
    stages = merged.world["pp"].value if "pp" in merged.world else 1
    for name, value in facts_of_pattern(pattern.value, stages).items():
        if name not in merged.world:
            merged.world[name] = Value(value, pattern.source, (), pattern.option)
            owner, argument = catalog.owners.get(name, ("", None))
            if argument is not None:
                merged.settings.setdefault(owner, {})[argument] = merged.world[name]


def _remove_sizes(merged: MergedRequest, catalog: Catalog, feature: str, source: str) -> None:
    """Remove the parallel sizes that lower layers give for a feature which a layer leaves out, each with a note."""
    for size, (owner, argument) in catalog.owners.items():
        if owner == feature and size in merged.world:
            value = merged.world.pop(size)
            if argument is not None:
                merged.settings.get(owner, {}).pop(argument, None)
            if value.value > 1:
                text = f"the {size_name(size)} {value.value} ({value.source}) is ignored, because {source} removes {feature}"
                merged.notes.append(PlanNote("note", feature, text))


def remaining_features(layers: Sequence[Layer]) -> list[str]:
    """The features that layers, low to high, request together: a layer takes out what lower ones request."""
    names: list[str] = []
    for layer in layers:
        names = [name for name in names if name not in layer.without]
        names += [name for name in layer.features if name not in names]
    return names


def _put(values: dict[str, Value], name: str, value: Any, layer: Layer) -> None:
    old = values.get(name)
    overrode = (*old.overrode, f"{old.source}: {old.value}") if old is not None and old.value != value else ()
    values[name] = Value(value, layer.source, overrode, layer.option)


def _unify_size_spellings(
    layer: Layer, overridden: Collection[str], catalog: Catalog, problems: list[Problem]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Fill in both spellings of a parallel size, ``--tp 2`` and ``tensor-parallel.size=2``, in values of one layer."""
    world = _typed_world(layer, overridden, problems)
    settings = {feature: dict(fields) for feature, fields in layer.settings.items()}
    for size, (owner, argument) in catalog.owners.items():
        if argument is None:
            continue
        given = settings.get(owner, {}).get(argument)
        if size in world and given is not None and given != world[size]:
            text = (
                f"{layer.source} gives the {FIELDS[size].meaning} twice: {size} = {world[size]} and {owner}.{argument} "
                f"= {given}"
            )
            fix = (Fix.drop_setting(f"{owner}.{argument}"), Fix.drop_field(size, layer.source))
            facts = [_given(size, world[size], layer), _given(f"{owner}.{argument}", given, layer)]
            problems.append(Problem("MS303", text, (owner,), (), layer.source, fix, facts))
        elif size in world:
            settings.setdefault(owner, {})[argument] = world[size]
        elif isinstance(given, int) and not isinstance(given, bool) and 1 <= given <= MOST:
            world[size] = given
    return world, settings


def _given(name: str, value: Any, layer: Layer) -> GivenValue:
    return GivenValue(name, value, layer.source, layer.option)


def _near_fields(name: str) -> list[str]:
    """Return the fields whose names, or those of Megatron-LM's arguments, are most like a name."""
    spellings = {argument: field.name for field in FIELDS.values() for argument in field.arguments}
    spellings |= {field: field for field in FIELDS}
    return list(dict.fromkeys(spellings[near] for near in near_names(name, spellings)))


def _typed_world(layer: Layer, overridden: Collection[str], problems: list[Problem]) -> dict[str, Any]:
    """Return the fields of one layer; a wrong value is a problem unless a higher layer gives the field, too."""
    world = {}
    for name, value in layer.world.items():
        if value is None:
            continue
        if name not in FIELDS:
            fix = renames(name, _near_fields(name)) or (Fix.drop_field(name, layer.source),)
            problems.append(
                Problem(
                    "MS301", Text.of("{name!r} is not a size or model option of a job", name=name), where=layer.source, fix=fix
                )
            )
            continue
        field, found = FIELDS[name], [] if name in overridden else problems
        typed, meaning = field.typed(value), Text.plain(field.meaning)
        facts = (_given(name, value, layer),)
        if typed is None:
            text = Text.of(
                "{name} ({meaning}) is {value}, not {kind}",
                name=name,
                meaning=meaning,
                value=brief(value),
                kind=Text.plain(_KINDS[field.kind]),
            )
            found.append(Problem("MS301", text, where=layer.source, fix=Fix.give_field(name, _example(field)), facts=facts))
        elif field.least is not None and not typed >= field.least:  # also not a number
            text = Text.of(
                "{name} is {value}, which is less than {least} ({meaning})",
                name=name,
                value=value,
                least=field.least,
                meaning=meaning,
            )
            found.append(
                Problem("MS301", text, where=layer.source, fix=Fix.give_field(name, field.least, or_more=True), facts=facts)
            )
        elif field.kind is int and typed > MOST:
            text = Text.of(
                "{name} is {value}, which is greater than {most} ({meaning})",
                name=name,
                value=brief(value),
                most=MOST,
                meaning=meaning,
            )
            found.append(Problem("MS301", text, where=layer.source, fix=Fix.give_field(name, _example(field)), facts=facts))
        elif field.words and typed not in field.words:
            near = near_names(typed, field.words, number=1) or list(field.words)
            words = ", ".join(field.words)
            text = Text.of("{name} is {value}, which is not one of {words}", name=name, value=brief(value), words=words)
            found.append(Problem("MS301", text, where=layer.source, fix=Fix.give_field(name, near[0]), facts=facts))
        else:
            world[name] = typed
    return world


_KINDS: Final[Mapping[type, str]] = {
    int: "a whole number",
    float: "a number",
    str: "a word",
    bool: "true or false",
    tuple: "a list of words",
}


def _example(field: Field) -> Any:
    """Return a value that a field of the job takes."""
    if field.words:
        return field.words[0]
    return {bool: True, str: "WORD", tuple: "WORD,WORD"}.get(field.kind, field.least or 1)
