"""The cases of the matrix: pairs of features, features in layouts, and larger sets. Light."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, Final
from zlib import crc32

from mindspeed import registry
from mindspeed.engine.resolution.environment import Environment
from mindspeed.engine.resolution.request import Layer
from mindspeed.files.tables import table_beside
from mindspeed.problems import ResolutionError
from mindspeed.workbench.verification.case import VerificationCase, build_case

STEPS: Final = 2
"""Optimizer steps of a case: gradients are those of the first, and a wrong update shows in the loss of the second."""
_BF16_OF: Final = 3
"""The number of cases of which one trains in bf16, chosen by its name."""


@dataclass(frozen=True, slots=True)
class CaseLayout:
    """Parallel sizes, and the features that a job of this layout has in addition to those of its sizes."""

    world: Mapping[str, Any]
    features: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Switch:
    """A choice that stock Megatron offers: fields of its configuration, a model, or features that only set its arguments.

    ``reproduction`` is a file of the repository that shows a disagreement of its layouts without mindspeed.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    world: Mapping[str, Any] = field(default_factory=dict)
    features: Sequence[str] = ()
    reproduction: str = ""


_TABLES: Final = table_beside(__file__)
LAYOUTS: Final = {name: CaseLayout(**row) for name, row in _TABLES["layouts"].items()}
"""Layouts in which every feature is judged. ``world_size`` beyond the product of the sizes are replicas."""
FEATURE_LAYOUTS: Final = tuple(name for name in LAYOUTS if name != "dp2")
"""Plain replicas are part of `dp2-sharded`."""
SWITCHES: Final = {name: Switch(**row) for name, row in _TABLES["switches"].items()}
"""Choices of stock Megatron that are judged in the layouts of `STOCK_LAYOUTS`, without a feature of ours at work."""
STOCK_LAYOUTS: Final = tuple(_TABLES["stock_layouts"])


@dataclass(frozen=True, slots=True)
class MatrixCase:
    """Some features, in a layout or in the smallest surroundings that suit them; or a switch of stock Megatron in a layout.

    ``given`` are sizes and a model shape, ``test`` is a command that judges the case instead of a proof on a tiny model.
    """

    features: tuple[str, ...]
    layout: str = ""
    switch: str = ""
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)
    test: str = ""

    @property
    def name(self) -> str:
        """``"rms-norm + swiglu"`` or ``"swiglu @ tp2"``, by which the store knows the case."""
        what = f"stock {self.switch}" if self.switch else " + ".join(self.features)
        more = [json.dumps(part, sort_keys=True) for part in (self.settings, self.given, self.test) if part]
        return " ".join([what, *(["@", self.layout] if self.layout else []), *more])

    @property
    def dtype(self) -> str:
        """Return bf16 for a third of all cases, the same ones at every run."""
        return "bf16" if not (self.switch or self.given) and crc32(self.name.encode()) % _BF16_OF == 0 else "fp32"

    @property
    def tested(self) -> tuple[str, ...]:
        """The features of the case, and those of its switch and its layout whose slots they leave free."""
        known = registry.catalog()
        taken = {slot for name in self.features for slot in known.feature(name).spec.slots}
        free = [name for name in self._layout.features if not taken.intersection(known.feature(name).spec.slots)]
        sizes = ["dp" if name == "world_size" else name for name in self._layout.world if self.switch]
        switched = [known.owners[size][0] for size in sizes if size in known.owners]
        return tuple(dict.fromkeys((*self.features, *switched, *self._switch.features, *free)))

    @property
    def world(self) -> dict[str, Any]:
        """The sizes of the case; a feature that declares a dtype for its verification gets that one."""
        known = registry.catalog()
        declared = any("dtype" in known.feature(name).spec.verify_with.world for name in self.tested)
        sizes = {**self._switch.world, **self._layout.world, **self.given}
        if "world_size" in self._layout.world:  # as many replicas of a job that a feature declares larger than the layout
            needed = [known.feature(name).spec.verify_with.world for name in self.tested]
            for size in ("tp", "pp", "cp"):
                sizes["world_size"] *= max([1, *(world.get(size, 1) // sizes.get(size, 1) for world in needed)])
        return sizes if declared else {"dtype": self.dtype} | sizes

    @property
    def facts(self) -> tuple[str, ...]:
        """The rows of the tables for this case: a change of another row does not make it stale."""
        return self.name, self.dtype, repr(self.tested), json.dumps([self.world, dict(self._switch.options)], sort_keys=True)

    @property
    def command(self) -> str:
        """The command that judges this case alone."""
        if self.switch:
            return f"mindspeed features matrix run --stock --switch {self.switch} --layout {self.layout} --again"
        sizes = {name: value for name, value in self.world.items() if value != "fp32"}
        options = [f"--{name.replace('_', '-')} {value}" for name, value in sizes.items()]
        options += [f"--set {name}.{key}={value}" for name, given in self.settings.items() for key, value in given.items()]
        return " ".join(["mindspeed features verify", *self.tested, *options])

    def build(self, environment: Environment | None = None) -> VerificationCase:
        """Plan both sides of the comparison. Raises ResolutionError where the features are refused."""
        layer = Layer("the matrix", settings=self.settings, world=self.world)
        case = build_case(self.tested, [layer], environment=environment, options=self._switch.options)
        return replace(case, recipe=replace(case.recipe, steps=STEPS))

    @property
    def _layout(self) -> CaseLayout:
        return LAYOUTS[self.layout] if self.layout else CaseLayout({})

    @property
    def _switch(self) -> Switch:
        return SWITCHES[self.switch] if self.switch else Switch()


def pairs(names: Iterable[str]) -> Iterator[MatrixCase]:
    """Every two of these features."""
    return (MatrixCase(pair) for pair in combinations(sorted(names), 2))


def in_layouts(names: Iterable[str], layouts: Iterable[str] = FEATURE_LAYOUTS) -> Iterator[MatrixCase]:
    """Each of these features in each layout; of layouts that differ in who holds a slot that the feature takes, the first."""
    for name in sorted(names):
        seen = set[tuple[Any, ...]]()
        for layout in layouts:
            case = MatrixCase((name,), layout)
            made = (*sorted(case.tested), *sorted(case.world.items() - {("dtype", case.dtype)}))
            if made not in seen:
                seen.add(made)
                yield case


def of_stock(switches: Iterable[str] = tuple(SWITCHES), layouts: Iterable[str] = STOCK_LAYOUTS) -> Iterator[MatrixCase]:
    """Each switch of stock Megatron in each layout; expert parallelism needs experts."""
    layouts = tuple(layouts)
    for switch in switches:
        dense = "num_experts" not in SWITCHES[switch].world
        for layout in layouts:
            if not (dense and "num_experts" in LAYOUTS[layout].world):
                yield MatrixCase((), layout, switch=switch)


def resolves(names: Sequence[str]) -> bool:
    """Return whether these features can be planned together, in the surroundings that they declare."""
    try:
        MatrixCase(tuple(names)).build()
    except ResolutionError:
        return False
    return True
