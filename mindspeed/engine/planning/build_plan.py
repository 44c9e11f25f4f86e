"""From resolved names to a plan: ask the features for overrides and patches, add the base plan, check the whole set."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mindspeed.engine.inspection.megatron_copies import mixed_roots
from mindspeed.engine.inspection.target_info import is_installed
from mindspeed.engine.planning.patch_checks import check_patches, notes_on, target_infos_of, with_sites, without_other_code
from mindspeed.engine.planning.plan import ActivationPlan, PlannedOverride, PlannedPatch
from mindspeed.engine.resolution.environment import Environment, version_in
from mindspeed.engine.resolution.planned_feature import PlannedFeature, PlanNote
from mindspeed.engine.resolution.resolver import Resolution
from mindspeed.plugins import ArgOverride, Condition, Feature, ModelCondition, Patch, World
from mindspeed.plugins.constraints import Constraint
from mindspeed.plugins.discovery import Catalog
from mindspeed.plugins.hookspecs import HOOKS
from mindspeed.plugins.manager import FeatureManager
from mindspeed.problems import Fix, Problem, ResolutionError
from mindspeed.process.providers import provider_of

HookPatches = Callable[[Collection[str], Collection[str], Environment, bool, frozenset[str]], Sequence[tuple[str, Patch]]]
"""``(hooks, overridden arguments, environment, proven, asked) -> [(owner, patch)]``.

``proven``: the plan has features to watch; ``asked``: the hooks before which conditions are asked.
"""


@dataclass(frozen=True, slots=True)
class Framework:
    """The framework's own part of every plan: the level-0 features of one platform, and the patches through which Megatron
    calls hooks and takes arguments.

    ``optional_arguments`` are those that no configuration of megatron-core has, so that they need not be taken.
    """

    base: tuple[type[Feature[Any]], ...]
    hook_patches: HookPatches
    check_overrides: Callable[[Sequence[PlannedOverride], str | None], list[Problem]]
    optional_arguments: frozenset[str] = frozenset()


def build_plan(resolution: Resolution, catalog: Catalog, environment: Environment, framework: Framework) -> ActivationPlan:
    """Make the plan of a resolution without problems. Raises ResolutionError for conflicts between patches or overrides."""
    world = resolution.world
    names = {feature.name for feature in resolution.features}
    types = (*framework.base, *(catalog.feature(feature.name) for feature in resolution.features))
    manager = FeatureManager(
        [
            _instance(feature, resolution.args[planned.name], world, planned)
            for feature, planned in zip(types, (*resolution.base, *resolution.features), strict=True)
        ]
    )
    problems: list[Problem] = []
    below, above = _layers(manager.call("megatron_args"), names)
    overrides = _overrides(below if environment.training else [], above, framework.optional_arguments, problems)
    problems += framework.check_overrides(overrides, environment.megatron)

    hooks = [name for name in HOOKS if names & manager.owners(name)]
    taken = [planned.override.argument for planned in overrides]
    asked = _asked_before(catalog.specs[name].constraints for name in names)
    ground, own = _layers(manager.call("patches"), names)
    proposed = [(owner, patch, True) for owner, answer in ground for patch in answer]
    # a hook point stays around what a feature puts in place of the original
    proposed += [
        (owner, patch, False) for owner, patch in framework.hook_patches(hooks, taken, environment, bool(names), asked)
    ]
    proposed += [(owner, patch, False) for owner, answer in own for patch in answer]
    patches = [
        PlannedPatch(owner, patch, patch.target, ground, _skipped(patch, environment)) for owner, patch, ground in proposed
    ]
    places = target_infos_of(patches, environment.megatron)
    patches = without_other_code(with_sites(patches, environment.megatron, places), environment.megatron, places)
    problems += check_patches(patches, environment.megatron, places)
    if is_installed(environment.megatron) and (mixed := mixed_roots()) is not None:
        problems.append(mixed)
    if problems:
        raise ResolutionError(problems)
    said = [PlanNote("note", name, text) for name, answer in manager.call("notes", without=names) for text in answer]
    skipped = [p for p in patches if p.skipped and not (p.ground and _skipped(p.patch, environment))]
    said += [PlanNote("left-out", p.owner, f"patch of {p.patch.target} is skipped: {p.skipped}") for p in skipped]
    return ActivationPlan(
        features=resolution.features,
        world=world,
        level=resolution.level,
        base=resolution.base,
        overrides=overrides,
        patches=tuple(patches),
        rows=(*resolution.rows, *said, *notes_on(patches, environment.megatron, places)),
        environment=environment.versions(),
        strict=resolution.strict,
    )


_ASKED_BEFORE: Final = {"spec": "layer_spec", "model": "model_built", "optimizer": "optimizer_built"}


def _asked_before(declared: Iterable[Iterable[Constraint]]) -> frozenset[str]:
    """Return the hooks before which conditions are asked once more: about a configuration, or about live objects."""
    constraints = [constraint for given in declared for constraint in given]
    live = {_ASKED_BEFORE[c.subject] for c in constraints if isinstance(c, ModelCondition)}
    return frozenset(live | {"config_ready" for c in constraints if isinstance(c, Condition)})


def _instance(feature: type[Feature[Any]], args: Any, world: World, planned: PlannedFeature) -> Feature[Any]:
    """Make a feature. Raises ResolutionError (MS901) with its name when its own code fails."""
    try:
        instance = feature(args, world)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin's own code may fail in any way; its name must be said
        name = planned.name
        text = f"the constructor of feature {name} failed with {type(error).__name__}: {error}"
        raise ResolutionError(
            [Problem("MS901", text, (name,), where=provider_of(feature), fix=Fix.give_option("--without", name))]
        ) from error
    instance.requested = planned.requested
    return instance


def manager_of(plan: ActivationPlan, catalog: Catalog, base: Iterable[type[Feature[Any]]]) -> FeatureManager:
    """Feature instances of a plan, base first. Raises ResolutionError when this process lacks one of them."""
    types: dict[str, type[Feature[Any]]] = {feature.spec.name: feature for feature in base}
    types |= {name: catalog.feature(name) for name in plan.names if name in catalog.usable and name not in types}
    features = (*plan.base, *plan.features)
    if absent := [planned for planned in features if planned.name not in types]:
        raise ResolutionError(map(_not_installed, absent))
    return FeatureManager([_instance(types[f.name], types[f.name].Args(**f.args), plan.world, f) for f in features])


def _not_installed(planned: PlannedFeature) -> Problem:
    text = f"the plan contains {planned.name} from {planned.distribution} {planned.version}, which is not installed"
    return Problem(
        "MS201", text, (planned.name,), fix=Fix.run_command(f"pip install {planned.distribution}=={planned.version}")
    )


_Answers = list[tuple[str, list[Any]]]


def _layers(answers: _Answers, names: Collection[str]) -> tuple[_Answers, _Answers]:
    """Split the answers of a hook into those of the base plan and those of the named features."""
    return [answer for answer in answers if answer[0] not in names], [answer for answer in answers if answer[0] in names]


def _overrides(
    below: _Answers, wanted_by: _Answers, optional: Collection[str], problems: list[Problem]
) -> tuple[PlannedOverride, ...]:
    """Merge what the features want, ``(feature, overrides)`` in plan order; those of the base plan, whose defaults
    differ only in Megatron-LM, are asked only for its training loop, and hold only where no feature says otherwise."""
    by_argument: dict[str, list[tuple[str, ArgOverride]]] = {}
    decided = {override.argument for _, given in wanted_by for override in given}
    for owner, given in [(o, [one for one in given if one.argument not in decided]) for o, given in below] + wanted_by:
        for override in given:
            by_argument.setdefault(override.argument, []).append((owner, override))
    for argument, wanted in by_argument.items():
        if any(override.value != wanted[0][1].value for _, override in wanted):
            values = " and ".join(f"{owner} sets it to {override.value!r}" for owner, override in wanted)
            text = f"Megatron's {argument} cannot have two values: {values}"
            names = tuple(owner for owner, _ in wanted)
            problems.append(Problem("MS402", text, names, fix=tuple(map(Fix.remove_feature, names))))
    return tuple(
        PlannedOverride(tuple(dict.fromkeys(owners)), override, argument in optional)
        for argument, wanted in by_argument.items()
        for override, owners in _by_condition(wanted)
    )


def _by_condition(wanted: Sequence[tuple[str, ArgOverride]]) -> Iterator[tuple[ArgOverride, list[str]]]:
    """Yield the overrides of one argument that differ in their condition, each with its owners."""
    for only in dict.fromkeys(override.only for _, override in wanted):
        same = [(owner, override) for owner, override in wanted if override.only == only]
        yield same[0][1], [owner for owner, _ in same]


def _skipped(patch: Patch, environment: Environment) -> str:
    """Return why a patch's `When` leaves it out; empty where it does not."""
    when = patch.when
    if when is None:
        return ""
    if when.platform is not None and when.platform != environment.platform:
        return f"only on {when.platform}"
    if when.megatron is not None and not version_in(environment.megatron or "", when.megatron):
        return f"only for megatron-core {when.megatron}"
    return ""
