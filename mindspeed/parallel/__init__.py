"""Memory and pipelines for modules of plain torch: regions that are recomputed or swapped, and a pipeline of modules."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from mindspeed.memory.checkpoint import Checkpoint as Checkpoint
    from mindspeed.memory.meter import Meter as Meter
    from mindspeed.memory.region import Region as Region
    from mindspeed.parallel.pipeline import Pipeline as Pipeline
    from mindspeed.parallel.recompute import RecomputePlan as RecomputePlan
    from mindspeed.parallel.recompute import RecomputePlanner as RecomputePlanner
    from mindspeed.parallel.swap import SwapActivations as SwapActivations

_MODULES: Final = {
    "Checkpoint": "mindspeed.memory.checkpoint",
    "Meter": "mindspeed.memory.meter",
    "Pipeline": "mindspeed.parallel.pipeline",
    "RecomputePlan": "mindspeed.parallel.recompute",
    "RecomputePlanner": "mindspeed.parallel.recompute",
    "Region": "mindspeed.memory.region",
    "SwapActivations": "mindspeed.parallel.swap",
}
"""The module of each public name."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
