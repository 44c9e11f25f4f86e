"""Build the case of a proof: a plan with the features, a plan without them, the model, and the claim. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import lcm
from typing import Any, Final

from mindspeed import registry
from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.engine.resolution.environment import Environment
from mindspeed.engine.resolution.request import Layer
from mindspeed.engine.resolution.resolution_state import Suggestions
from mindspeed.job.world import PARALLEL_SIZES, UnknownValue, World
from mindspeed.platforms.backend_rules import BackendRules
from mindspeed.plugins.answers import implements
from mindspeed.plugins.conditions import obstacle
from mindspeed.plugins.discovery import Catalog
from mindspeed.plugins.feature import FeatureArgs, FeatureSpec, Numerics
from mindspeed.problems import ResolutionError
from mindspeed.workbench.verification.shape import SHAPES, Recipe, options_of
from mindspeed.workbench.verification.surroundings import DeclaredSurroundings, required_by, surroundings_of

DROPOUT: Final = 0.1
"""For features that claim equal bits and leave the layout alone: both runs must then draw the same masks."""
PROCESSES: Final = (1, 2, 4, 8)
"""Numbers of processes that are tried in turn when the caller gives none; larger sizes have as many as they need."""
DEFAULT_SIZE: Final = 2
"""Of every parallel size that a feature under test owns and nobody gave."""
_CONFLICTS: Final = ("MS201", "MS202", "MS203", "MS206", "MS212")
"""Codes of contradictions between features that were requested."""
_CLAIMS: Final = ("exact", "reordered", "approximate")


@dataclass(frozen=True, slots=True)
class VerificationCase:
    """The claim that training by ``plan`` gives what training by ``baseline`` gives, within ``numerics``.

    ``features`` are the names under test. The baseline is unmodified Megatron in one process, unless the caller put
    features also, or those under test claim equal bits and leave the layout alone: then it has the same layout. A feature
    that trains another model is on both sides, in the baseline by its reference. ``note`` says which of the surroundings that
    the features declare are missing.
    """

    features: tuple[str, ...]
    plan: ActivationPlan
    baseline: ActivationPlan
    recipe: Recipe
    numerics: Numerics
    note: str = ""


@dataclass(frozen=True, slots=True)
class CaseRequest:
    """The request behind a case: see `build_case` for the fields."""

    hybrid: bool = field(default=False, kw_only=True)

    features: tuple[str, ...]
    layers: tuple[Layer, ...]
    also: tuple[str, ...]
    nproc: int | None
    environment: Environment | None
    known: Catalog
    options: Mapping[str, Any]
    level_one: bool = False
    beside: tuple[str, ...] = ()
    note: str = ""

    def within(self, surroundings: DeclaredSurroundings) -> CaseRequest:
        """The same request in these surroundings; what was given wins over them."""
        also = tuple(dict.fromkeys((*self.also, *surroundings.both)))
        layers = (*surroundings.layers, *self.layers)
        return replace(self, layers=layers, also=also, beside=surroundings.tested, note=surroundings.note)

    @property
    def world(self) -> dict[str, Any]:
        """The sizes and the model shape that were given."""
        return {name: value for layer in self.layers for name, value in layer.world.items()}

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """The settings that were given, by feature; those of a later layer win one by one."""
        merged: dict[str, dict[str, Any]] = {}
        for layer in self.layers:
            for owner, values in layer.settings.items():
                merged[owner] = {**merged.get(owner, {}), **values}
        return merged

    @property
    def processes(self) -> tuple[int, ...]:
        """The numbers of processes to try: the one that was given alone, else those that the sizes divide."""
        if count := self.nproc or self.world.get("world_size"):
            return (count,)
        sizes = dict.fromkeys(PARALLEL_SIZES, 1) | self.default_sizes | self.given_sizes
        whole, experts = sizes["tp"] * sizes["cp"] * sizes["pp"], sizes["ep"] * sizes["pp"]
        return tuple(count for count in PROCESSES if count % whole == count % experts == 0) or (lcm(whole, experts),)

    @property
    def tested(self) -> list[FeatureSpec]:
        """Select the features under test: the named ones and what they require, without what both runs have."""
        names = required_by((*self.features, *self.beside), self.known) - required_by(self.also, self.known)
        return [self.known.feature(name).spec for name in sorted(names)]

    @property
    def numerics(self) -> Numerics:
        """The weakest claim of what is under test."""
        claims = [spec.numerics for spec in self.tested] or [Numerics.exact()]
        weakest = max(claims, key=lambda numerics: _CLAIMS.index(numerics.claim))
        return replace(weakest, loss=max(c.loss for c in claims), gradient=max(c.gradient for c in claims))

    @property
    def keeps_layout(self) -> bool:
        return self.numerics.claim == "exact" and not any(spec.sizes for spec in self.tested)

    def sizes_of(self, names: Iterable[str]) -> list[str]:
        """Parallel sizes that these features and their requirements own."""
        return [size for name in required_by(names, self.known) for size in self.known.feature(name).spec.sizes]

    @property
    def default_sizes(self) -> dict[str, int]:
        """The parallel sizes under test that are not set."""
        names = (*self.also, *self.beside, *self.features)
        return {size: DEFAULT_SIZE for size in self.sizes_of(names) if size != "dp" and not self._given(size)}

    @property
    def given_sizes(self) -> dict[str, int]:
        """The parallel sizes that were given as such, or as the setting of the feature that owns them."""
        found = {size: int(self.world[size]) for size in PARALLEL_SIZES if self.world.get(size)}
        for owner, values in self.settings.items():
            sizes = self.known.feature(owner).spec.sizes if owner in self.known.usable else {}
            found |= {size: int(values[name]) for size, name in sizes.items() if name and isinstance(values.get(name), int)}
        return found

    @property
    def segments(self) -> int:
        """The segments that the pattern of a hybrid model needs: those of model chunks, 1 where stages share it equally."""
        sizes = self.default_sizes | self.given_sizes
        return sizes.get("pp", 1) * sizes["vpp"] if sizes.get("vpp", 1) > 1 else 1

    def unrequested_level1(self, names: Iterable[str]) -> tuple[str, ...]:
        """Features that level 1 would add by itself, and that none of these may require; none where it may add them."""
        if self.level_one:
            return ()
        invited = required_by(names, self.known, perhaps=True)
        return tuple(name for name in self.known.usable if self.known.feature(name).spec.level == 1 and name not in invited)

    def recipes(self) -> Iterator[Recipe]:
        """A recipe for each tiny model, in the order of preference; a request for experts takes one that has them."""
        settings = {name: self.world[name] for name in ("dtype", "micro_batch_size", "global_batch_size") if name in self.world}
        sparse = bool(self.world.get("num_experts"))
        for shape in (shape for shape in SHAPES if shape.num_experts or not sparse):
            shape = shape.changed(self.world).with_options(options_of(self.world) | dict(self.options))
            if self.hybrid or shape.hybrid_layer_pattern:
                shape = shape.as_hybrid(shape.hybrid_layer_pattern, self.segments)
            shape = replace(shape, dropout=DROPOUT if self.keeps_layout else 0.0)
            yield Recipe(shape, **settings)

    def plan(self, recipe: Recipe, world_size: int, untried: Suggestions | None = None) -> ActivationPlan:
        """The plan with everything. Raises ResolutionError, with fixes as `mindspeed.registry.resolve`."""
        names = (*self.also, *self.beside, *self.features)
        low = Layer("chosen by verify", world={**recipe.world(), **self.default_sizes, "world_size": world_size})
        high = Layer("under test", features=names, without=self.unrequested_level1(names))
        return registry.resolve([low, *self.layers, high], self.environment, untried=untried)

    def baseline(self, plan: ActivationPlan, recipe: Recipe) -> ActivationPlan:
        """The plan without what is under test, for the same model."""
        references = {spec.name: dict(spec.reference) for spec in self.tested if spec.reference is not None}
        both = required_by(self.also, self.known) | references.keys()
        owned = PARALLEL_SIZES if self.keeps_layout else [size for size in self.sizes_of(both) if size != "dp"]
        sizes = {size: getattr(plan.world, size) for size in owned}
        alone = not self.keeps_layout and not self.sizes_of(both)
        settings = {name: values for name, values in self.settings.items() if name in both}
        settings |= {name: {**settings.get(name, {}), **reference} for name, reference in references.items()}
        if sizes.get("pp", 1) == 1:
            recipe = replace(recipe, shape=recipe.shape.of_one_stage())
        layer = Layer(
            "chosen by verify",
            features=tuple(sorted(both)),
            settings=settings,
            world={**recipe.world(), **sizes, "world_size": 1 if alone else plan.world.world_size},
            without=tuple(name for name in self.unrequested_level1(()) if name not in both),
            platform=plan.environment["platform"],
        )
        return registry.resolve([layer], self.environment)

    def obstacles(self, recipe: Recipe) -> int:
        """The number of features that a model alone keeps from their work; a value that is not known yet keeps none."""
        names = required_by((*self.also, *self.beside, *self.features), self.known)
        sizes = {"world_size": self.processes[0], **self.default_sizes, **self.given_sizes}
        world = World({**recipe.world(), **sizes, **self.world})
        return sum(self._is_hindered(self.known.feature(name).spec, self._args(name), world) for name in names)

    def is_applicable(self, plan: ActivationPlan) -> bool:
        """Return whether every feature fits the plan's model and, unless the processes are given, has ranks to work on."""
        for planned in plan.features:
            feature = self.known.feature(planned.name)
            if self._is_hindered(feature.spec, feature.Args(**planned.args), plan.world):
                return False
            if len(self.processes) > 1 and any(getattr(plan.world, size) == 1 for size in feature.spec.sizes):
                return False
        return True

    def _is_hindered(self, spec: FeatureSpec, args: FeatureArgs | None, world: World) -> bool:
        """Return whether a condition on the feature alone fails; one that declares it idle hinders nothing."""
        if args is None:
            return False
        try:
            found = obstacle(spec.constraints, spec.name, args, world)
        except UnknownValue:
            return False
        return found is not None and found.condition.otherwise != "idle"

    def _args(self, name: str) -> FeatureArgs | None:
        """The arguments of a feature by what was given; None where these are refused."""
        try:
            return self.known.feature(name).Args(**self.settings.get(name, {}))
        except ValueError:
            return None

    def _given(self, size: str) -> bool:
        owner, argument = self.known.owners[size]
        return any(size in layer.world or argument in layer.settings.get(owner, {}) for layer in self.layers)


def build_case(
    features: Sequence[str],
    layers: Sequence[Layer] = (),
    also: Sequence[str] = (),
    nproc: int | None = None,
    environment: Environment | None = None,
    options: Mapping[str, Any] | None = None,
    level_one: bool = False,
    hybrid: bool = False,
) -> VerificationCase:
    """The case that proves whether ``features`` do what they claim. Raises ResolutionError when no tiny model suits them.

    ``layers`` (low to high) may hold settings, sizes and a model shape; ``also`` are features that both runs have, ``options``
    further fields of the model's TransformerConfig. With ``level_one`` both runs have what optimization level 1 adds, with
    ``hybrid`` the model is Megatron's HybridModel, as it is with a pattern among the sizes.
    What is not given is chosen: the surroundings that the features declare where these are possible, sizes under test
    are 2, model and number of processes the first that suit.
    """
    known = registry.catalog()
    request = CaseRequest(
        tuple(features), tuple(layers), tuple(also), nproc, environment, known, options or {}, level_one, hybrid=hybrid
    )
    refused: list[ResolutionError] = []
    for surroundings in surroundings_of(request.features, known):
        try:
            return _first_case(request.within(surroundings))
        except ResolutionError as error:
            refused.append(error)
            if _is_unavoidable(error, request):
                break
    raise refused[0]


def _is_unavoidable(error: ResolutionError, request: CaseRequest) -> bool:
    """Return whether the features under test contradict one another, whatever is around them."""
    names = {*request.features, *required_by(request.features, request.known)}
    return any(problem.code in _CONFLICTS and names.issuperset(problem.features) for problem in error.problems)


def held_to(rules: BackendRules) -> Layer:
    """Return the setting that holds a run to the rules of a collective backend, of the feature that has such a setting."""
    emulating = (feature.spec.name for feature in registry.base_features("cpu") if "backend" in feature.Args.model_fields)
    return Layer("--backend", settings={next(emulating): {"backend": rules}})


def with_few_micro_batches(world: World) -> Layer:
    """A layer that shortens a step: after twice as many micro-batches as stages no schedule has more in flight."""
    count = min(world.num_micro_batches, 2 * world.pp)
    return Layer("few micro-batches", world={"global_batch_size": world.micro_batch_size * world.dp * count})


def _first_case(request: CaseRequest) -> VerificationCase:
    """The case of the first model and number of processes that suit. Raises ResolutionError when none does."""
    refused: list[tuple[ResolutionError, Recipe, int]] = []
    second_best: tuple[ActivationPlan, Recipe] | None = None
    recipes = list(request.recipes())
    hindered = [request.obstacles(recipe) for recipe in recipes]
    for recipe in (recipe for recipe, count in zip(recipes, hindered, strict=True) if count == min(hindered)):
        for count in request.processes:
            try:
                plan = request.plan(recipe, count, untried="none")
            except ResolutionError as error:
                refused.append((error, recipe, count))
                continue
            if request.is_applicable(plan):
                return _case(request, plan, recipe)
            second_best = second_best or (plan, recipe)
    if second_best is None:
        raise _shared_refusal(request, refused)
    return _case(request, *second_best)


def _shared_refusal(request: CaseRequest, refused: Sequence[tuple[ResolutionError, Recipe, int]]) -> ResolutionError:
    """The problems, with tried fixes, that no model and no number of processes avoids; else those of the try with fewest."""
    shared = set.intersection(*({(found.code, found.message) for found in error.problems} for error, *_ in refused))
    fewest = min(refused, key=lambda one: (any(found.code == "MS302" for found in one[0].problems), len(one[0].problems)))
    try:
        request.plan(*(refused[0] if shared else fewest)[1:])
    except ResolutionError as error:
        of_all = [found for found in error.problems if (found.code, found.message) in shared]
        return ResolutionError(of_all or error.problems)
    raise AssertionError("a request that was refused is accepted with tried fixes")


def _case(request: CaseRequest, plan: ActivationPlan, recipe: Recipe) -> VerificationCase:
    arguments = {planned.override.argument: bool(planned.override.value) for planned in plan.overrides}
    recipe = replace(
        recipe,
        documents=arguments.get("reset_attention_mask", False),
        restart=arguments.get("reset_position_ids", False),
        ragged=arguments.get("variable_seq_lengths", False),
        adam=any(implements(request.known.feature(spec.name), "resting") for spec in request.tested),
    )
    return VerificationCase(request.features, plan, request.baseline(plan, recipe), recipe, request.numerics, request.note)


def plan_without(case: VerificationCase, name: str) -> ActivationPlan:
    """The plan of a case without one of its features, on as many processes. Raises ResolutionError where others need it."""
    kept = [planned for planned in case.plan.features if planned.name != name]
    level1 = (spec for spec in registry.catalog().specs.values() if spec.level == 1)
    layer = Layer(
        "beside others",
        features=tuple(planned.name for planned in kept),
        settings={planned.name: planned.args for planned in kept},
        world={**case.recipe.world(), **{size: getattr(case.plan.world, size) for size in (*PARALLEL_SIZES, "world_size")}},
        without=(name, *(spec.name for spec in level1 if spec.name not in case.plan.names)),
        platform=case.plan.environment["platform"],
    )
    return registry.resolve([layer])
