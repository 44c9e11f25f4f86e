"""Turn Megatron-LM's arguments into request layers, by what features declare (`MegatronFlag`) and by parallel sizes. Light."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from mindspeed.engine.inspection.cli_arguments import Surface
from mindspeed.engine.resolution.planned_feature import PlanNote
from mindspeed.engine.resolution.request import MEGATRON_DEFAULTS as DEFAULTS
from mindspeed.engine.resolution.request import Layer
from mindspeed.job.megatron_arguments import dests_of, world_of
from mindspeed.job.world import FIELDS, PARALLEL_SIZES
from mindspeed.megatron_lm.given_arguments import Given
from mindspeed.plugins import Fix, GivenValue, MegatronFlag, Problem, RequiresSlot
from mindspeed.plugins.discovery import Catalog

_PATTERN: Final = "hybrid_layer_pattern"


def declared_flags(catalog: Catalog) -> Iterator[tuple[str, MegatronFlag]]:
    """Every declared argument of Megatron-LM with its feature, in name order."""
    for name, spec in catalog.specs.items():
        for flag in spec.megatron_flags:
            yield name, flag


def removable_flags(catalog: Catalog) -> list[tuple[str, MegatronFlag]]:
    """Every argument of Megatron-LM that belongs to a feature: the declared ones, and the parallel sizes."""
    sizes = ((owner, dest) for size, (owner, _) in catalog.owners.items() for dest in dests_of(size))
    return [*declared_flags(catalog), *((owner, MegatronFlag(dest, switch="on")) for owner, dest in sizes)]


@dataclass(slots=True)
class ArgumentLayers:
    """Layers that follow from Megatron's arguments: ``given`` by source, ``defaults`` below every other layer."""

    given: dict[str, Layer] = field(default_factory=dict)
    defaults: Layer = field(default_factory=lambda: Layer(DEFAULTS))
    notes: list[PlanNote] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def layer(self, argument: Given) -> Layer:
        return self.given.get(argument.source, Layer(argument.source, option=argument.option))

    def put(self, argument: Given, **fields: Any) -> None:
        self.given[argument.source] = replace(self.layer(argument), **fields)

    def request(self, argument: Given, feature: str) -> None:
        self.put(argument, features=(*self.layer(argument).features, feature))

    def note(self, feature: str, text: str) -> None:
        self.notes.append(PlanNote("note", feature, text))


def layers_of(
    given: Mapping[str, Given], known: Surface, catalog: Catalog, others: Sequence[Layer], world_size: int
) -> ArgumentLayers:
    """Return one layer per argument of Megatron that has a meaning here, and one for what follows from defaults.

    An argument that is a setting counts only where its feature is active: switched on by an argument or by a size, or
    requested in ``others``, the other layers of the request.
    """
    made = ArgumentLayers()
    if "yaml_cfg" in given:
        text = "Megatron reads its arguments from a file, so sizes are compared with the plan only after it has read the file"
        made.note("megatron-lm", text)
        return made
    complete = "use_checkpoint_args" not in given
    defaults = {name: found[0].default for name, found in known.by_dest.items()} if complete else {}
    values = {**defaults, **{dest: argument.value for dest, argument in given.items()}}
    world = world_of(values)
    _put_sizes(made, world, given, complete)
    sizes = {size: world.get(size, (1, ()))[0] for size in PARALLEL_SIZES}
    sizes["dp"] = world_size // max(1, sizes["tp"] * sizes["pp"] * sizes["cp"])
    switched_off = _switched_off(world)
    _put_switches(made, {dest: one for dest, one in given.items() if dest not in switched_off}, catalog, sizes)
    _put_choices(made, given, catalog, others, sizes)
    active = {name for layer in (*others, *made.given.values()) for name in layer.features}
    active |= {owner for size, (owner, _) in catalog.owners.items() if sizes.get(size, 1) > 1}
    _put_settings(made, given, values if complete else {}, catalog, active)
    return made


def _switched_off(world: Mapping[str, Any]) -> frozenset[str]:
    """Return the arguments that Megatron-LM itself leaves without effect, as ``--sequence-parallel`` of one rank."""
    off = (field for name, field in FIELDS.items() if field.default is False and name in world and not world[name][0])
    return frozenset(field.arguments[0] for field in off)


def _put_sizes(made: ArgumentLayers, world: Mapping[str, Any], given: Mapping[str, Given], complete: bool) -> None:
    fallback: dict[str, Any] = {}
    for size, (value, names) in world.items():
        if not complete and len(names) > 1:
            continue  # one of them may come from the checkpoint
        decided = next((given[name] for name in names if name in given), None)
        if decided is not None:
            made.put(decided, world={**made.layer(decided).world, size: value})
        elif complete and (size in PARALLEL_SIZES or not FIELDS[size].has_default or FIELDS[size].default != value):
            fallback[size] = value  # what a world has without being told is left out, but sizes are told with their source
    made.defaults = replace(made.defaults, world=fallback)


def _put_switches(made: ArgumentLayers, given: Mapping[str, Given], catalog: Catalog, sizes: Mapping[str, int]) -> None:
    for feature, flag in declared_flags(catalog):
        argument = given.get(flag.dest)
        if argument is None or (flag.size and sizes[flag.size] == 1):
            continue
        if flag.switch == "on" and not flag.is_choice:
            made.request(argument, feature)
        elif flag.switch == "off" and argument.value in flag.values:
            made.put(argument, without=(*made.layer(argument).without, feature))


def _put_choices(
    made: ArgumentLayers, given: Mapping[str, Given], catalog: Catalog, others: Sequence[Layer], sizes: Mapping[str, int]
) -> None:
    choices: dict[str, dict[Any, str]] = {}
    for feature, flag in declared_flags(catalog):
        if flag.is_choice and flag.dest in given and not (flag.size and sizes[flag.size] == 1):
            choices.setdefault(flag.dest, {}).update(dict.fromkeys(flag.values, feature))
    for dest, by_value in choices.items():
        argument = given[dest]
        values = list(dict.fromkeys(argument.value if isinstance(argument.value, list) else [argument.value]))
        what = f"{argument.source} {' '.join(map(str, values))}"
        slots = {slot for feature in by_value.values() for slot in catalog.specs[feature].slots}
        if holder := requested_holder(slots, catalog, others):
            if by_value.get(values[0]) != holder or len(values) > 1:
                made.note(holder.partition(".")[0], f"{what} is ignored, because {holder} is requested")
        elif len(values) == 1 and values[0] in by_value:
            made.request(argument, by_value[values[0]])
            made.note(by_value[values[0]], f"{what} is {by_value[values[0]]}")
        else:
            known = ", ".join(sorted(map(str, by_value)))
            differs = "differs between layers, but all layers need the same value"
            text, fix = f"{what} {differs if len(values) > 1 else f'must be one of {known}'}", Fix.advise(f"use one of {known}")
            made.problems.append(Problem("MS605", text, where=argument.source, fix=fix, facts=(argument.fact,)))


def requested_holder(slots: set[str], catalog: Catalog, others: Sequence[Layer]) -> str:
    """The requested feature that holds one of these slots, or the setting that chooses one; empty where there is none."""
    for layer in others:
        for name in layer.features:
            if name in catalog.specs and not slots.isdisjoint(catalog.specs[name].slots):
                return name
        for chooser in catalog.choosers:
            for constraint in catalog.specs[chooser].constraints:
                if isinstance(constraint, RequiresSlot) and constraint.slot in slots:
                    value = layer.settings.get(chooser, {}).get(constraint.setting)
                    if value is not None:
                        return value if value in catalog.specs else f"{chooser}.{constraint.setting}"
    return ""


def _put_settings(
    made: ArgumentLayers, given: Mapping[str, Given], defaults: Mapping[str, Any], catalog: Catalog, active: set[str]
) -> None:
    settings: dict[str, dict[str, Any]] = {}
    for feature, flag in declared_flags(catalog):
        if feature not in active or not flag.setting:
            continue
        argument = given.get(flag.dest)
        if argument is not None and not _left_to_megatron(made, feature, flag, argument):
            value = flag.convert(argument.value) if flag.convert is not None else argument.value
            made.put(argument, settings={**made.layer(argument).settings, feature: {flag.setting: value}})
        elif flag.follows_default and flag.dest in defaults:
            settings.setdefault(feature, {})[flag.setting] = defaults[flag.dest]
    made.defaults = replace(made.defaults, settings=settings)


def _left_to_megatron(made: ArgumentLayers, feature: str, flag: MegatronFlag, argument: Given) -> bool:
    values = argument.value if isinstance(argument.value, list) else [argument.value]
    unknown = [str(value) for value in values if value not in flag.takes] if flag.takes else []
    if unknown:
        spelled = f"{argument.source} {' '.join(map(str, values))}"
        made.note(feature, f"{spelled} is passed to Megatron, because {feature} does not support {', '.join(unknown)}")
    return bool(unknown)


def disagreements(theirs: Sequence[Layer], ours: Sequence[Layer], catalog: Catalog) -> list[Problem]:
    """MS303 for every setting or size that Megatron's flags and ours give differently on one command line."""
    spelled = {size: (owner, argument) for size, (owner, argument) in catalog.owners.items() if argument is not None}
    said: dict[tuple[str, str], tuple[Any, Layer]] = {}
    for layer in theirs:
        is_pattern = _PATTERN in layer.world  # what follows from it is compared with it, by its own checks
        for size, value in ({_PATTERN: layer.world[_PATTERN]} if is_pattern else layer.world).items():
            said["world", size] = (value, layer)
            if size in spelled:
                said[spelled[size]] = (value, layer)
        for feature, fields in layer.settings.items():
            said.update({(feature, name): (value, layer) for name, value in fields.items()})
    problems = []
    for layer in ours:
        mine = {("world", size): value for size, value in layer.world.items()}
        mine |= {(feature, name): value for feature, fields in layer.settings.items() for name, value in fields.items()}
        for key, value in mine.items():
            theirs_value, other = said.get(key, (value, layer))
            if _plain(theirs_value) != _plain(value):
                what = f"--{key[1].replace('_', '-')} {value}" if key[0] == "world" else f"--set {key[0]}.{key[1]}={value}"
                text = f"{other.source} is {theirs_value}, but {what} sets another value"
                owners = (key[0],) if key[0] != "world" else ()
                name = key[1] if key[0] == "world" else ".".join(key)
                facts = [GivenValue(name, theirs_value, other.source, other.option), GivenValue(name, value, layer.source)]
                fix = Fix.advise("keep one of the two; both set the same value")
                problems.append(Problem("MS303", text, owners, where=layer.source, fix=fix, facts=facts))
    return problems


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
