"""The share of a feature's calls of operators that the kernels of an NPU and of a GPU would run. Light, without torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from mindspeed import registry
from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.engine.resolution.request import Layer
from mindspeed.job.world import PARALLEL_SIZES
from mindspeed.workbench.verification.case import VerificationCase, build_case

if TYPE_CHECKING:
    from mindspeed.workbench.verification.pool import WorkerPool

DEVICES: Final = ("npu", "cuda")
DROPOUT: Final = 0.1
"""Megatron's default."""
MODEL: Final = {"dtype": "bf16", "hidden_size": 512, "ffn_hidden_size": 512, "global_batch_size": 4}
"""Widths that kernels take: those of products with a collective begin at 256 for a rank."""


@dataclass(slots=True)
class KernelCalls:
    """Count calls of operators on a device: ``taken`` by a kernel, out of ``total``. ``refused`` describes the others."""

    taken: int = 0
    total: int = 0
    refused: set[str] = field(default_factory=set)

    def add(self, other: KernelCalls) -> None:
        """Add the calls of another rank or operator."""
        self.taken += other.taken
        self.total += other.total
        self.refused |= other.refused

    @property
    def share(self) -> str:
        """The share that a kernel takes, "-" without calls."""
        return f"{self.taken / self.total:.0%}" if self.total else "-"


Calls = dict[tuple[str, str], KernelCalls]
"""By the file of an operator and device."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The calls of a feature by device, and the notes that its plan has for a device beyond those for the CPU."""

    feature: str
    calls: Mapping[str, KernelCalls]
    notes: Mapping[str, list[str]]

    @property
    def unexplained(self) -> list[str]:
        """Describe the refused calls that no note of the plan announces."""
        return [
            f"{self.feature} on {device}: {call}"
            for device, counted in self.calls.items()
            if not self.notes[device]
            for call in sorted(counted.refused)
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the row of the feature in the table."""
        return {device: {"share": counted.share, "notes": self.notes[device]} for device, counted in self.calls.items()}


def judge(name: str, pool: WorkerPool, also: Iterable[str] = (), world: Mapping[str, Any] | None = None) -> Judgement:
    """Train a small bf16 job with a feature and dropout on the CPU, and judge its calls by the kernels of other devices.

    Judged are the operators that the feature declares, or every operator of the job where it declares none. ``also`` are
    further features. Raises ResolutionError where the job is refused, and RunError as `WorkerPool.run` does.
    """
    case = build_case([name, *also], [Layer("kernel calls", world={**MODEL, **(world or {})})])
    recipe = replace(case.recipe, steps=1, shape=replace(case.recipe.shape, dropout=DROPOUT))
    calls = _merged(pool.judge(case.plan, recipe, int(case.plan.world.world_size)))
    own = registry.catalog().feature(name).spec.ops or {file for file, _ in calls}
    known = set(_notes(case, name, "cpu"))
    notes = {device: [text for text in _notes(case, name, device) if text not in known] for device in DEVICES}
    return Judgement(name, {device: _total(calls, own, device) for device in DEVICES}, notes)


def _notes(case: VerificationCase, name: str, platform: str) -> list[str]:
    """The notes about a feature in the plan of the case's job on another platform."""
    return [row.text for row in _plan_on(case, platform).rows if row.feature == name and row.kind == "note"]


def _plan_on(case: VerificationCase, platform: str) -> ActivationPlan:
    sizes = {size: getattr(case.plan.world, size) for size in (*PARALLEL_SIZES, "world_size")}
    level1 = (name for name, spec in registry.catalog().specs.items() if spec.level == 1 and name not in case.plan.names)
    layer = Layer(
        "kernel calls",
        features=case.plan.names,
        settings={planned.name: planned.args for planned in case.plan.features},
        world={**case.recipe.world(), **sizes},
        without=tuple(level1),
        platform=platform,
    )
    return registry.resolve([layer])


def _merged(ranks: Iterable[Calls]) -> Calls:
    found: defaultdict[tuple[str, str], KernelCalls] = defaultdict(KernelCalls)
    for calls in ranks:
        for place, counted in calls.items():
            found[place].add(counted)
    return dict(found)


def _total(calls: Calls, files: Iterable[str], device: str) -> KernelCalls:
    found = KernelCalls()
    for file in files:
        found.add(calls.get((file, device), KernelCalls()))
    return found
