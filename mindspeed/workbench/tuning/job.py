"""A search for a job: what it fixes, what it leaves open, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from mindspeed import registry
from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.engine.resolution.environment import Environment
from mindspeed.engine.resolution.request import Layer
from mindspeed.engine.resolution.request_merge import merge, remaining_features
from mindspeed.engine.resolution.setting_validation import flag
from mindspeed.job.hybrid_pattern import facts_of_pattern
from mindspeed.memory_planner.plans import peak_of
from mindspeed.ops.variants import has_variant
from mindspeed.plugins.answers import implements
from mindspeed.plugins.discovery import Catalog
from mindspeed.problems import Fix, MindSpeedError, Problem, ResolutionError
from mindspeed.workbench.training.shape import given_world, trainer_request
from mindspeed.workbench.tuning.layout_jobs import FixedRequest
from mindspeed.workbench.tuning.measure import telling
from mindspeed.workbench.tuning.search import SLACK, Configuration, Found, Question, Resolved, search
from mindspeed.workbench.tuning.space import PATTERN, SIZES, Choice, Layouts, candidates, choices, with_segments
from mindspeed.workbench.tuning.time import DEFAULTS, Machine

CountBytes = Callable[[Choice, Mapping[str, Any]], int]
"""``(choice, world) -> bytes`` of the fullest rank."""
CANDIDATES: Final = 400
"""Fastest configurations from which a calibration chooses."""


@dataclass(frozen=True, slots=True)
class SearchJob:
    """A request of which a search varies sizes and features. ``layers`` go from low to high and hold what is fixed."""

    layers: tuple[Layer, ...]
    train: Mapping[str, Any]
    environment: Environment
    model: Mapping[str, Any]
    pinned: Mapping[str, int]
    tried: tuple[str, ...]
    catalog: Catalog

    @property
    def pattern(self) -> str:
        """The pattern of a hybrid model."""
        return str(self.model.get(PATTERN) or "")

    @property
    def request(self) -> FixedRequest:
        settings: dict[str, dict[str, Any]] = {}
        for layer in self.layers:
            for name, values in layer.settings.items():
                sizes = {argument for owner, argument in self.catalog.owners.values() if owner == name}
                settings.setdefault(name, {}).update({key: value for key, value in values.items() if key not in sizes})
        level = next((layer.level for layer in reversed(self.layers) if layer.level is not None), 2)
        without = tuple(name for layer in self.layers for name in layer.without)
        return FixedRequest(tuple(remaining_features(self.layers)), settings, without, level)

    def question(self, machine: Machine, device_bytes: float) -> Question:
        """Return what is searched."""
        layouts = Layouts(self.model, candidates(self.model, self.pinned))
        tried = choices(self.catalog, self.model, self.request.features, self.tried)
        return Question(layouts, tried, self.request, machine, device_bytes)

    def search(self, machine: Machine, device_bytes: float, top: int, count: CountBytes | None = None) -> Found:
        """Search, and raise ResolutionError (MS345) where no configuration is feasible or none fits.

        ``count`` has the last word on the bytes of what the planner of memory does not find far too large.
        """

        def accepts(choice: Choice, world: Mapping[str, Any]) -> Resolved | None:
            found = self.resolved(choice, world)
            if count is None or found is None or (found.bytes or 0) > SLACK * device_bytes:
                return found
            return Resolved(count(choice, world))

        found = search(self.question(machine, device_bytes), self.catalog, has_variant, accepts, top)
        if not found.rows:
            raise ResolutionError(self._nothing_feasible())
        if not any(row.fits for row in found.rows):
            raise ResolutionError([self._nothing_fits(found, device_bytes)])
        return found

    def telling(self, machine: Machine, device_bytes: float, count: int) -> list[Configuration]:
        """Return up to ``count`` configurations to measure, which the resolver takes and which fit."""
        found = search(self.question(machine, device_bytes), self.catalog, has_variant, _takes, CANDIDATES)
        chosen = telling([row for row in found.rows if row.fits] or found.rows, count, machine)
        taken = [(row, self.resolved(row.choice, {**self.model, **row.sizes})) for row in chosen]
        return [row for row, made in taken if made is not None and (made.bytes is None or made.bytes <= device_bytes)]

    def resolved(self, choice: Choice, world: Mapping[str, Any]) -> Resolved | None:
        """Resolve a configuration, patches and all, and count the bytes of its fullest rank as ``memory plan`` does."""
        try:
            made = registry.resolve(self._layers(choice, world), self._environment(world), untried="none")
        except ResolutionError:
            return None
        try:
            return Resolved(peak_of(made, self.catalog))
        except MindSpeedError:  # a size that the planner of memory needs is not known
            return Resolved()

    def plan_of(self, choice: Choice, world: Mapping[str, Any], *above: Layer) -> ActivationPlan:
        """Return the plan of a configuration, with further layers of a request. Raises ResolutionError."""
        return registry.resolve([*self._layers(choice, world), *above], self._environment(world))

    def _layers(self, choice: Choice, world: Mapping[str, Any]) -> list[Layer]:
        return [*self.layers, self._layer(choice, world)]

    def job_of(self, row: Configuration) -> dict[str, Any]:
        """Return the job file of a configuration as a mapping, without defaults of the trainer."""
        request = self.request
        world = {**given_world(self.layers[1:]), **with_segments(row.sizes, self.pattern)}
        world.pop("world_size", None)
        settings = {**request.settings, **row.choice.settings}
        job: dict[str, Any] = {
            "features": list(dict.fromkeys((*request.features, *row.choice.features))),
            "without": list(request.without),
            "settings": {name: dict(values) for name, values in settings.items() if values},
            "world": world,
            "level": request.level,
            "platform": self.environment.platform,
            "train": dict(self.train),
        }
        return {key: value for key, value in job.items() if value not in ([], {})}

    def _layer(self, choice: Choice, world: Mapping[str, Any]) -> Layer:
        sizes = with_segments({name: world[name] for name in SIZES}, self.pattern)
        return Layer("tune", features=choice.features, settings=choice.settings, world=sizes)

    def _environment(self, world: Mapping[str, Any]) -> Environment:
        return replace(self.environment, world_size=int(world["world_size"]))

    def _nothing_feasible(self) -> list[Problem]:
        """Name each pinned value without which there is a configuration; else what is wrong with the plainest layout."""
        problems = []
        for name in self.pinned:
            freed = replace(self, pinned={key: value for key, value in self.pinned.items() if key != name})
            again = search(freed.question(Machine(DEFAULTS["cpu"]), float("inf")), self.catalog, has_variant, _takes, 1)
            if again.feasible:
                text = (
                    f"no valid configuration (layout and features) has {name}={self.pinned[name]}, but {again.feasible} valid "
                    f"configurations have another {name}"
                )
                problems.append(Problem("MS345", text, fix=Fix.drop_option(flag(name))))
        if problems:
            return problems
        try:
            self.plan_of(Choice(), {**self.model, **dict.fromkeys(SIZES, 1), **self.pinned})
        except ResolutionError as error:
            return list(error.problems)
        ranks, layers = self.model["world_size"], self.model["num_layers"]
        text = f"no layout of {ranks} ranks divides the {layers} layers, the heads and the batch of this model"
        fix = (
            "use another --world-size or --global-batch-size; mindspeed features check --tp N --pp N shows why a layout of "
            "your choice does not work"
        )
        return [Problem("MS345", text, fix=Fix.advise(fix))]

    def _nothing_fits(self, found: Found, device_bytes: float) -> Problem:
        """Name the smallest configuration, the bytes that it has too many, and the feature that saves most of them."""
        smallest = min([*found.rows, *([found.smallest] if found.smallest else [])], key=lambda row: row.predicted_bytes)
        world = {**self.model, **smallest.sizes}
        exact = self.resolved(smallest.choice, world)
        least = exact.bytes if exact is not None and exact.bytes is not None else smallest.predicted_bytes
        text = (
            f"none of {found.feasible} configurations fits: the smallest needs {least:,} bytes, "
            f"{least - device_bytes:,.0f} too many ({smallest.key})"
        )
        saved = {name: least - size for name, size in self._with_one_more(smallest.choice, world) if size < least}
        if not saved:
            return Problem("MS345", text, fix=Fix.advise("use more ranks or a smaller model"))
        best = max(sorted(saved), key=lambda name: saved[name])
        fix = f"--try {best}, which saves {saved[best]:,} bytes of it, more ranks or a smaller model"
        return Problem("MS345", text, fix=Fix.advise(fix))

    def _with_one_more(self, choice: Choice, world: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
        """Yield the bytes of a configuration with each feature more that may save some and is not tried."""
        for name in sorted(self.catalog.usable):
            feature = self.catalog.feature(name)
            saves = implements(feature, "saved_tensors") or implements(feature, "resting")
            if saves and name not in (*choice.features, *self.request.features, *self.tried):
                more = self.resolved(replace(choice, features=(*choice.features, name)), world)
                if more is not None and more.bytes is not None:
                    yield name, more.bytes


def _takes(choice: Choice, world: Mapping[str, Any]) -> Resolved:
    return Resolved()


def make_search(
    layers: Sequence[Layer],
    train: Mapping[str, Any],
    environment: Environment,
    world_size: int,
    tried: Sequence[str] = (),
    is_built: bool = False,
) -> SearchJob:
    """Make the search for a request. Raises ResolutionError with every problem of values.

    A model that ``is_built`` by the trainer, in measured steps or from a job file, has to be one that it can build.
    """
    catalog = registry.catalog_for([*(name for layer in layers for name in (*layer.features, *layer.settings)), *tried])
    lowest, problems = trainer_request(layers, train, environment, is_built)
    problems = [*merge(layers, catalog, environment).problems, *problems]
    if problems:
        raise ResolutionError(problems)
    given = given_world(layers)
    pinned: dict[str, int] = {name: int(given[name]) for name in SIZES if name in given}
    for size, (owner, argument) in catalog.owners.items():
        for layer in layers:
            if argument and argument in layer.settings.get(owner, {}) and size in SIZES:
                pinned[size] = int(layer.settings[owner][argument])
    own = {"world_size": world_size, "platform": environment.platform, "megatron": environment.megatron}
    facts = facts_of_pattern(pattern, 1) if (pattern := given.get(PATTERN)) else {}
    model = {**lowest.world, **facts, **given, **own}
    searched = (*SIZES, "world_size")
    others = ({name: value for name, value in layer.world.items() if name not in searched} for layer in layers)
    fixed = (lowest, *(replace(layer, world=world) for layer, world in zip(layers, others, strict=True)))
    return SearchJob(fixed, train, environment, model, pinned, tuple(tried), catalog)
