"""Read a Megatron-LM command line: the flags of mindspeed, and the features and sizes that Megatron's arguments give.

Our flags are taken out of the command line, Megatron's stay in it, so that each is read by one parser. Light: Megatron's
arguments are known from the recorded surface, nothing of Megatron is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

from mindspeed.inspection.cli_arguments import Surface
from mindspeed.megatron import training_flags as flags
from mindspeed.megatron.given_arguments import (
    Given,
    abbreviations,
    given_arguments,
    surface_or_nearest,
    unknown_options,
    without_arguments,
)
from mindspeed.megatron.pad_token_check import warning_of_arguments
from mindspeed.plugins.discovery import Catalog
from mindspeed.plugins.problems import MindSpeedError, Problem, ResolutionError
from mindspeed.resolution.planned_feature import PlanNote
from mindspeed.resolution.request import JobFile, Layer, layer_from_environment, load_job_file, parse_assignments, split_names

COMMAND_LINE: Final = "command line"
OWN_FLAGS: Final = {
    "--features": "names of features, separated by commas",
    "--set": "a setting, as feature.field=value",
    "--without": "names of features to leave out, separated by commas",
    "--mindspeed-config": "a job file",
    "--optimization-level": "0, 1 or 2",
    "--strict": "",
}
"""Our flags on a Megatron-LM command line, with what must follow each; an empty text is a switch."""

OLD_FLAGS: Final = "mindspeed.legacy.flags"
"""The module that knows flags of the old MindSpeed; looked for only where a command line has something that Megatron lacks."""


@dataclass(frozen=True, slots=True)
class ScriptRequest:
    """A Megatron-LM command line, read.

    ``defaults`` are below every other layer, ``layers`` (job file, environment, Megatron's flags) go from low to high, and
    ``command_line``, our flags, is above them. ``rest`` is the command line without our flags, ``given`` Megatron's
    arguments that stand on it by dest, ``notes`` what the reader of the plan must know.
    """

    defaults: tuple[Layer, ...]
    layers: tuple[Layer, ...]
    command_line: Layer
    rest: tuple[str, ...]
    given: Mapping[str, Given] = field(default_factory=dict)
    notes: tuple[PlanNote, ...] = ()


def read_command_line(
    arguments: Sequence[str],
    environ: Mapping[str, str],
    version: str | None,
    catalog: Callable[[], Catalog],
    also: Sequence[Layer] = (),
    world_size: int = 1,
) -> ScriptRequest:
    """Read the arguments of a Megatron-LM script, for the Megatron of this ``version``.

    ``also`` are layers of the same command line that were read elsewhere, as the options of ``mindspeed run``. Raises
    ResolutionError with every problem: flags of ours that cannot be read, and values that ours and Megatron's give differently.
    """
    problems: list[Problem] = []
    own, rest = split_own_flags(arguments, problems)
    job = _job_file(own, problems)
    environment = _environment(environ, problems)
    command_line = _command_line(own, problems)
    known = surface_or_nearest(version)
    old, rest, old_notes = _old_flags(rest, given_arguments(rest, known), known, catalog, problems)
    given = given_arguments(rest, known)
    ours = [*([old] if old is not None else []), *also, command_line]
    given, rest, removed = without_arguments(given, rest, known, [environment, *([job.layer] if job else []), *ours])
    requested = {name for layer in (*ours, environment, *([job.layer] if job else [])) for name in layer.features}
    theirs, defaults, notes = layers_of(given, known, requested, world_size)
    problems += disagreements(theirs, ours)
    if problems:
        raise ResolutionError(problems)
    if job is not None and job.train:
        notes.append(
            PlanNote("note", "job file", "its section train is for mindspeed pretrain, Megatron-LM has flags of its own")
        )
    if text := warning_of_arguments({dest: argument.value for dest, argument in given.items()}, version):
        notes.append(PlanNote("note", "megatron-lm", text))
    below = (defaults, *([old] if old is not None else []))
    layers = (*([job.layer] if job is not None else []), environment, *theirs)
    notes = [*notes, *removed, *abbreviations(rest, known), *old_notes]
    return ScriptRequest(below, layers, command_line, tuple(rest), given, tuple(notes))


def split_own_flags(arguments: Sequence[str], problems: list[Problem]) -> tuple[dict[str, list[str]], list[str]]:
    """Our flags with their values, and everything else in its order. Adds MS301 for a flag without its value."""
    own: dict[str, list[str]] = {}
    rest, words = [], iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name not in OWN_FLAGS:
            rest.append(word)
        elif not OWN_FLAGS[name]:
            own.setdefault(name, []).append(value)
        else:
            following = value if equals else next(words, None)
            if following is None or (not equals and following.startswith("--")):
                problems.append(Problem("MS301", f"{name} needs {OWN_FLAGS[name]}", where=COMMAND_LINE))
                rest += [following] if following is not None else []
            else:
                own.setdefault(name, []).append(following)
    return own, rest


def layers_of(
    given: Mapping[str, Given], known: Surface, requested: set[str], world_size: int
) -> tuple[list[Layer], Layer, list[PlanNote]]:
    """One layer per argument of Megatron that means something to us, one for what follows from defaults, and notes.

    An argument that is a setting counts only where its feature is active: switched on by an argument, by a size, or in
    ``requested``.
    """
    if "yaml_cfg" in given:
        text = "Megatron takes its arguments from a file: sizes are compared with the plan once it has read it"
        return [], Layer("Megatron's defaults"), [PlanNote("note", "megatron-lm", text)]
    complete = "use_checkpoint_args" not in given
    defaults = {name: known.by_dest[name][0].default for name in known.by_dest} if complete else {}
    values = {**defaults, **{dest: argument.value for dest, argument in given.items()}}
    world = flags.world_of(values)
    active = requested | {flags.FEATURES[dest] for dest in _switches(given, world)} | _owners(world, world_size)
    layers: dict[str, Layer] = {}
    fallback: dict[str, Any] = {}
    for size, (value, names) in world.items():
        if not complete and len(names) > 1:
            continue  # one of them may come from the checkpoint
        decided = next((given[name] for name in names if name in given), None)
        if decided is not None:
            layer = layers.setdefault(decided.source, Layer(decided.source))
            layers[decided.source] = replace(layer, world={**layer.world, size: value})
        elif complete:
            fallback[size] = value
    for dest in _switches(given, world):
        layer = layers.setdefault(given[dest].source, Layer(given[dest].source))
        layers[layer.source] = replace(layer, features=(*layer.features, flags.FEATURES[dest]))
    for dest, (off, feature) in flags.WITHOUT.items():
        if dest in given and given[dest].value == off:
            layer = layers.setdefault(given[dest].source, Layer(given[dest].source))
            layers[layer.source] = replace(layer, without=(*layer.without, feature))
    settings: dict[str, dict[str, Any]] = {}
    notes: list[PlanNote] = []
    for dest, (feature, name) in flags.SETTINGS.items():
        if feature not in active:
            continue
        if dest in given and not _left_to_megatron(dest, given[dest], feature, notes):
            layer = layers.setdefault(given[dest].source, Layer(given[dest].source))
            layers[layer.source] = replace(layer, settings={feature: {name: given[dest].value}})
        elif dest in flags.DEFAULTS_THAT_DIFFER and dest in known.by_dest and complete:
            settings.setdefault(feature, {})[name] = values[dest]
    return list(layers.values()), Layer("Megatron's defaults", world=fallback, settings=settings), notes


def _left_to_megatron(dest: str, argument: Given, feature: str, notes: list[PlanNote]) -> bool:
    ours = flags.OPTIONS_OF_OTHERS.get(dest)
    others = [value for value in argument.value if value not in ours] if ours is not None else []
    if others:
        text = f"{argument.source} {' '.join(argument.value)} is left to Megatron, {feature} does not know {', '.join(others)}"
        notes.append(PlanNote("note", feature, text))
    return bool(others)


def _switches(given: Mapping[str, Given], world: Mapping[str, tuple[Any, tuple[str, ...]]]) -> list[str]:
    """Given arguments that switch on a feature; Megatron drops sequence parallelism itself where there is one tensor rank."""
    tensor_ranks = world.get("tp", (1, ()))[0]
    return [dest for dest in flags.FEATURES if dest in given and (dest != "sequence_parallel" or tensor_ranks > 1)]


def _owners(world: Mapping[str, tuple[Any, tuple[str, ...]]], world_size: int) -> set[str]:
    sizes = {size: world.get(size, (1, ()))[0] for size in ("tp", "pp", "vpp", "cp", "ep")}
    sizes["dp"] = world_size // max(1, sizes["tp"] * sizes["pp"] * sizes["cp"])
    return {owner for size, owner in flags.OWNERS.items() if sizes[size] > 1}


def disagreements(theirs: Sequence[Layer], ours: Sequence[Layer]) -> list[Problem]:
    """MS303 for every setting or size that Megatron's flags and ours give differently on one command line."""
    spelled = {dest: f"{flags.OWNERS[size]}.size" for dest, size in flags.WORLD.items() if size in flags.OWNERS}
    owner_of = {size: name.partition(".")[0] for size, name in ((flags.WORLD[dest], text) for dest, text in spelled.items())}
    owner_of["vpp"] = flags.OWNERS["vpp"]
    said: dict[tuple[str, str], tuple[Any, str]] = {}
    for layer in theirs:
        for size, value in layer.world.items():
            said["world", size] = (value, layer.source)
            if size in owner_of:
                said[owner_of[size], "size"] = (value, layer.source)
        for feature, fields in layer.settings.items():
            said.update({(feature, name): (value, layer.source) for name, value in fields.items()})
    problems = []
    for layer in ours:
        mine = {("world", size): value for size, value in layer.world.items()}
        mine |= {(feature, name): value for feature, fields in layer.settings.items() for name, value in fields.items()}
        for key, value in mine.items():
            if key in said and _plain(said[key][0]) != _plain(value):
                theirs_value, source = said[key]
                what = f"--{key[1].replace('_', '-')} {value}" if key[0] == "world" else f"--set {key[0]}.{key[1]}={value}"
                text = f"{source} is {theirs_value}, and {what} says otherwise"
                owners = (key[0],) if key[0] != "world" else ()
                problems.append(
                    Problem("MS303", text, owners, where=layer.source, fix="keep one of the two, they are one value")
                )
    return problems


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _job_file(own: Mapping[str, list[str]], problems: list[Problem]) -> JobFile | None:
    files = own.get("--mindspeed-config", [])
    if len(files) > 1:
        text = f"--mindspeed-config is given {len(files)} times: {', '.join(files)}"
        problems.append(Problem("MS301", text, where=COMMAND_LINE, fix="put everything into one file"))
        return None
    try:
        return load_job_file(files[0]) if files else None
    except MindSpeedError as error:
        problems.extend(error.problems)
        return None


def _environment(environ: Mapping[str, str], problems: list[Problem]) -> Layer:
    try:
        return layer_from_environment(environ)
    except MindSpeedError as error:
        problems.extend(error.problems)
        return Layer("environment variable")


def _command_line(own: Mapping[str, list[str]], problems: list[Problem]) -> Layer:
    settings: dict[str, dict[str, Any]] = {}
    try:
        settings = parse_assignments(own.get("--set", []), "--set")
    except MindSpeedError as error:
        problems.extend(error.problems)
    level = None
    for text in own.get("--optimization-level", []):
        if text in ("0", "1", "2"):
            level = int(text)
        else:
            problem = Problem("MS301", f"optimization level {text} is not 0, 1 or 2", where=COMMAND_LINE)
            problems.append(replace(problem, fix="--optimization-level 2"))
    return Layer(
        COMMAND_LINE,
        features=split_names(",".join(own.get("--features", []))),
        settings=settings,
        without=split_names(",".join(own.get("--without", []))),
        level=level,
        strict=True if "--strict" in own else None,
    )


def _old_flags(
    arguments: list[str], given: Mapping[str, Given], known: Surface, catalog: Callable[[], Catalog], problems: list[Problem]
) -> tuple[Layer | None, list[str], list[PlanNote]]:
    """Ask `mindspeed.legacy.flags`, where it is installed, for what Megatron's parser does not take: layer, rest, notes."""
    strange = any(_is_strange(known, dest, argument.value) for dest, argument in given.items())
    if not (strange or unknown_options(arguments, known)) or not _is_there(OLD_FLAGS):
        return None, arguments, []
    old = import_module(OLD_FLAGS).read_old_flags(arguments, frozenset(known.by_option), catalog())
    problems += old.problems
    return old.layer, list(old.rest), [PlanNote("note", "old flags", text) for text in old.notes]


def _is_strange(known: Surface, dest: str, value: Any) -> bool:
    choices = known.by_dest[dest][0].choices
    return choices is not None and isinstance(value, str) and value not in choices


def _is_there(module: str) -> bool:
    package = module.rpartition(".")[0]
    return find_spec(package) is not None and find_spec(module) is not None
