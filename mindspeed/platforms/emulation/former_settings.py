"""Settings of the emulation under their former names, when they were settings of the platform."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from mindspeed.engine.resolution.planned_feature import PlanNote
from mindspeed.engine.resolution.request import Layer
from mindspeed.platforms.emulation.feature import DeviceEmulation, DeviceEmulationArgs

_FORMER: Final = "cpu-platform"
_NAME: Final = DeviceEmulation.spec.name


def with_present_names(layer: Layer) -> Layer:
    """Return a layer whose settings have their present names, with a warning for each that had its former one."""
    given = layer.settings.get(_FORMER, {})
    former = {name: value for name, value in given.items() if name in DeviceEmulationArgs.model_fields}
    if not former:
        return layer
    kept = {name: value for name, value in given.items() if name not in former}
    settings = {**layer.settings, _FORMER: kept, _NAME: {**former, **layer.settings.get(_NAME, {})}}
    notes = [PlanNote("warning", _FORMER, f"{_FORMER}.{name} is {_NAME}.{name} now") for name in former]
    return replace(layer, settings=settings, notes=(*layer.notes, *notes))
