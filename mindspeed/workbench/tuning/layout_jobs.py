"""The layouts of a search as jobs of the resolver, which decides once for each combination of the sizes that it reads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mindspeed.engine.resolution.environment import made_up
from mindspeed.engine.resolution.jobs import JobSet
from mindspeed.engine.resolution.request import Layer
from mindspeed.engine.resolution.resolution_state import HasVariant
from mindspeed.engine.resolution.resolver import feasible
from mindspeed.job.world import FIELDS, World
from mindspeed.plugins.answers import LAYER_SPLIT, Contribution
from mindspeed.plugins.discovery import Catalog
from mindspeed.workbench.tuning.space import PATTERN, SIZES, Choice, Layouts

Mask = NDArray[np.bool_]
Settings = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class FixedRequest:
    """The common parts of every configuration of a search: requested features, settings, removed features, level."""

    features: tuple[str, ...] = ()
    settings: Settings = field(default_factory=dict)
    without: Collection[str] = ()
    level: int = 2


class ReadWorld(World):
    """A job that records the names of the fields that are read."""

    def __init__(self, values: Mapping[str, Any], read: set[str], layer_split: Sequence[int] = ()) -> None:
        super().__init__(values, layer_split)
        object.__setattr__(self, "_read", read)

    def __getattribute__(self, name: str) -> Any:
        if name in _RECORDED:
            object.__getattribute__(self, "_read").add(name)
        return super().__getattribute__(name)

    @property
    def dp(self) -> int:
        known = object.__getattribute__(self, "__dict__")
        return max(1, int(known["world_size"]) // int(known["tp"] * known["pp"] * known["cp"]))

    @property
    def num_micro_batches(self) -> int:
        known = object.__getattribute__(self, "__dict__")
        return int(known["global_batch_size"]) // int(known["micro_batch_size"] * ReadWorld.dp.fget(self))  # type: ignore[attr-defined]


_RECORDED: Final = frozenset({*FIELDS, LAYER_SPLIT, "dp", "num_micro_batches"})
VARIED: Final = frozenset({*SIZES, "dp", "num_micro_batches"})
_OF_SEGMENTS: Final = frozenset({PATTERN, LAYER_SPLIT})
"""Fields that the segments of a hybrid model decide."""


class Answers(NamedTuple):
    """The results of a function of the job that has read these fields of what features contributed."""

    read: frozenset[str]
    contributed: Contribution
    jobs: Mapping[Any, JobSet]


class LayoutJobs:
    """The layouts of one search; bit ``i`` of a set of jobs is row ``i``."""

    is_single = False

    def __init__(self, layouts: Layouts) -> None:
        self.layouts = layouts
        self.everything: JobSet = (1 << len(layouts)) - 1
        self._kept: dict[Hashable, list[Answers]] = {}

    def values(
        self, key: Hashable, given: World, contribution: Contribution, function: Callable[[World], Any]
    ) -> Mapping[Any, JobSet]:
        """Call a function once for each combination of the fields that it reads, and keep the results."""
        kept = self._kept.setdefault(key, [])
        for answers in kept:
            if answers.contributed == _among(contribution, answers.read):
                return answers.jobs
        jobs, read = self._tabulated(given, contribution, function)
        kept.append(Answers(read, _among(contribution, read), jobs))
        return jobs

    def _tabulated(
        self, given: World, contribution: Contribution, function: Callable[[World], Any]
    ) -> tuple[Mapping[Any, JobSet], frozenset[str]]:
        values = dict(contribution)
        split = values.pop(LAYER_SPLIT, ())
        common = {name: value for name, value in given.known().items() if name not in SIZES}
        fields: set[str] = set()
        while True:
            rows, inverse = self.layouts.distinct(sorted(fields))
            read: set[str] = set()
            worlds = ({**common, **self.layouts.varied(int(row)), **values} for row in rows)
            answers = [function(ReadWorld(world, read, split)) for world in worlds]
            varied = read & VARIED
            if self.layouts.given_pattern and read & _OF_SEGMENTS:
                varied |= {"pp", "vpp"}
            if varied <= fields:
                break
            fields |= varied
        numbers: dict[Any, int] = {}
        codes = np.array([numbers.setdefault(answer, len(numbers)) for answer in answers])[inverse]
        return {answer: job_set(codes == number) for answer, number in numbers.items()}, frozenset(read)


def _among(contribution: Contribution, read: frozenset[str]) -> Contribution:
    return tuple((name, value) for name, value in contribution if name in read)


class Feasibility:
    """The layouts in which the resolver accepts a choice of features."""

    def __init__(self, catalog: Catalog, layouts: Layouts, request: FixedRequest, has_variant: HasVariant) -> None:
        self.catalog, self.has_variant = catalog, has_variant
        self.jobs = LayoutJobs(layouts)
        model = dict(layouts.model)
        self._environment = made_up(str(model.pop("platform")), model.pop("megatron", None))
        self._request = Layer("request", request.features, request.settings, model, tuple(request.without), level=request.level)

    def taken(self, choice: Choice) -> tuple[Mask, dict[str, Mask]]:
        """Return for each layout whether the resolver accepts the choice with it, and where each feature is active then."""
        layers = (self._request, Layer("choice", choice.features, choice.settings))
        found = feasible(layers, self.catalog, self._environment, self.jobs, self.has_variant)
        count = len(self.jobs.layouts)
        return mask_of(found.jobs, count), {name: mask_of(jobs, count) for name, jobs in found.active.items()}


def job_set(mask: Mask) -> JobSet:
    """Return a mask over the layouts as a set of jobs."""
    return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")


def mask_of(jobs: JobSet, count: int) -> Mask:
    """Return a set of jobs as a mask over ``count`` layouts."""
    packed = np.frombuffer(jobs.to_bytes((count + 7) // 8, "little"), dtype=np.uint8)
    return np.unpackbits(packed, count=count, bitorder="little").astype(np.bool_)
