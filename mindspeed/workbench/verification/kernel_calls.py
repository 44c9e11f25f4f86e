"""The share of a feature's calls of operators that the kernels of an NPU and of a GPU would run. Light, without torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from mindspeed import registry
from mindspeed.engine.resolution.request import Layer
from mindspeed.workbench.verification.case import build_case
from mindspeed.workbench.verification.pool import WorkerPool

DEVICES: Final = ("npu", "cuda")
DROPOUT: Final = 0.1
"""Megatron's default."""


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


Calls = dict[tuple[str, str], KernelCalls]
"""By the file of an operator and device."""


def calls_of(name: str, pool: WorkerPool) -> dict[str, KernelCalls]:
    """Train a small bf16 job with a feature and dropout on the CPU, and count its calls by device.

    Counted are the operators that the feature declares, or every operator of the job where it declares none. Raises
    ResolutionError where the feature is refused, and RunError as `WorkerPool.run` does.
    """
    case = build_case([name], [Layer("kernel calls", world={"dtype": "bf16"})])
    recipe = replace(case.recipe, steps=1, shape=replace(case.recipe.shape, dropout=DROPOUT))
    calls = merged(pool.judge(case.plan, recipe, int(case.plan.world.world_size)))
    own = registry.catalog().feature(name).spec.ops or {file for file, _ in calls}
    return {device: _total(calls, own, device) for device in DEVICES}


def merged(ranks: Iterable[Calls]) -> Calls:
    """Sum the calls of ranks."""
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
