"""From resolved names to a plan: ask the features for overrides and patches, add the base plan, check the whole set."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from mindspeed.inspection.target_info import is_installed
from mindspeed.planning.framework import Framework
from mindspeed.planning.patch_checks import check_patches, notes_on, target_infos_of, with_sites
from mindspeed.planning.plan import ActivationPlan, PlannedOverride, PlannedPatch
from mindspeed.plugins.discovery import Catalog
from mindspeed.plugins.feature import Feature
from mindspeed.plugins.hookspecs import HOOKS
from mindspeed.plugins.manager import FeatureManager
from mindspeed.plugins.patches import ArgOverride, Patch, Replace
from mindspeed.plugins.problems import Problem, ResolutionError
from mindspeed.plugins.world import World
from mindspeed.resolution.environment import Environment, version_in
from mindspeed.resolution.planned_feature import PlanNote
from mindspeed.resolution.resolver import Resolution


def build_plan(resolution: Resolution, catalog: Catalog, environment: Environment, framework: Framework) -> ActivationPlan:
    """Make the plan of a resolution without problems. Raises ResolutionError for conflicts between patches or overrides."""
    from mindspeed.inspection.megatron_copies import mixed_roots

    world = resolution.world
    names = {feature.name for feature in resolution.features}
    types = (*framework.base, *(catalog.feature(feature.name) for feature in resolution.features))
    manager = FeatureManager([_instance(feature, resolution.args[feature.spec.name], world) for feature in types])
    for feature, planned in zip(manager.features, (*resolution.base, *resolution.features), strict=True):
        feature.requested = planned.requested
    problems: list[Problem] = []
    below, above = _layers(manager.call("megatron_args"), names)
    overrides = _overrides(below if environment.training else [], above, framework.optional_arguments, problems)
    problems += framework.check_overrides(overrides, environment.megatron)

    slots = {slot for feature in resolution.features for slot in feature.slots}
    guard = _Guard(environment, slots)
    hooks = [name for name in HOOKS if names & manager.owners(name)]
    taken = [planned.override.argument for planned in overrides]
    ground, own = _layers(manager.call("patches"), names)
    patches = [guard.planned(owner, patch, ground=True) for owner, given in ground for patch in given]
    # a hook point stays around what a feature puts in place of the original
    patches += [guard.planned(owner, patch) for owner, patch in framework.hook_patches(hooks, taken, environment, bool(names))]
    patches += [guard.planned(owner, patch) for owner, given in own for patch in given]
    places = target_infos_of(patches, environment.megatron)
    patches = _superseded(with_sites(patches, environment.megatron, places), resolution.supersedes)
    problems += check_patches(patches, environment.megatron, places)
    if is_installed(environment.megatron) and (mixed := mixed_roots()) is not None:
        problems.append(mixed)
    if problems:
        raise ResolutionError(problems)
    return ActivationPlan(
        features=resolution.features,
        world=world,
        level=resolution.level,
        base=resolution.base,
        overrides=overrides,
        patches=tuple(patches),
        rows=(*resolution.rows, *_skipped_rows(patches), *notes_on(patches, environment.megatron, places)),
        environment=environment.versions(),
        strict=resolution.strict,
    )


def _instance(feature: type[Feature[Any]], args: Any, world: World) -> Feature[Any]:
    """Make a feature. Raises ResolutionError (MS901) with its name when its own code fails."""
    try:
        return feature(args, world)
    except Exception as error:
        name = feature.spec.name
        text = f"feature {name} cannot be made: {type(error).__name__}: {error}"
        raise ResolutionError([Problem("MS901", text, (name,), fix=f"--without {name}")]) from error


def manager_of(plan: ActivationPlan, catalog: Catalog, base: Iterable[type[Feature[Any]]]) -> FeatureManager:
    """Feature instances of a plan, base first. Raises ResolutionError when this process lacks one of them."""
    known: dict[str, type[Feature[Any]]] = {feature.spec.name: feature for feature in base}
    problems, instances = [], []
    for planned in (*plan.base, *plan.features):
        feature = known.get(planned.name) or (catalog.feature(planned.name) if planned.name in catalog.usable else None)
        if feature is None:
            text = f"the plan has {planned.name} from {planned.distribution} {planned.version}, which is not installed here"
            problems.append(
                Problem("MS201", text, (planned.name,), fix=f"pip install {planned.distribution}=={planned.version}")
            )
            continue
        instance = _instance(feature, feature.Args(**planned.args), plan.world)
        instance.requested = planned.requested
        instances.append(instance)
    if problems:
        raise ResolutionError(problems)
    return FeatureManager(instances)


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
            who = " and ".join(f"{owner} sets it to {override.value!r}" for owner, override in wanted)
            names = tuple(owner for owner, _ in wanted)
            problems.append(
                Problem(
                    "MS402", f"Megatron's {argument} cannot have two values: {who}", names, fix=f"take out {' or '.join(names)}"
                )
            )
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


class _Guard:
    """Decides a patch's `When` for one environment and one set of held slots."""

    def __init__(self, environment: Environment, slots: set[str]) -> None:
        self.environment = environment
        self.slots = slots

    def planned(self, owner: str, patch: Patch, ground: bool = False) -> PlannedPatch:
        return PlannedPatch(owner, patch, patch.target, ground, self._skipped(patch))

    def _skipped(self, patch: Patch) -> str:
        when = patch.when
        if when is None:
            return ""
        if when.platform is not None and when.platform != self.environment.platform:
            return f"only on {when.platform}"
        if when.megatron is not None and not version_in(self.environment.megatron or "", when.megatron):
            return f"only for megatron-core {when.megatron}"
        if when.slot_empty is not None and when.slot_empty in self.slots:
            return f"the slot {when.slot_empty} is held"
        return ""


def _superseded(patches: Sequence[PlannedPatch], supersedes: Sequence[tuple[str, str, str]]) -> list[PlannedPatch]:
    """Leave out the Replace of a feature that another one at the same site supersedes."""
    replacing = {(p.owner, p.site) for p in patches if isinstance(p.patch, Replace) and not p.skipped}
    if not supersedes:
        return list(patches)
    result = []
    for planned in patches:
        winner = next(
            (
                f"superseded by {new}, because {reason}"
                for new, old, reason in supersedes
                if old == planned.owner and isinstance(planned.patch, Replace) and (new, planned.site) in replacing
            ),
            "",
        )
        result.append(replace(planned, skipped=planned.skipped or winner))
    return result


def _skipped_rows(patches: Iterable[PlannedPatch]) -> Iterable[PlanNote]:
    skipped = (p for p in patches if p.skipped and not p.ground)
    return (PlanNote("left-out", p.owner, f"patch of {p.patch.target} is left out: {p.skipped}") for p in skipped)
