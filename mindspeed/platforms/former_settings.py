"""Settings of cpu-platform that another feature now has, under their former names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

from mindspeed.engine.resolution.planned_feature import PlanNote
from mindspeed.engine.resolution.request import Layer
from mindspeed.plugins.feature import Feature

_FORMER: Final = "cpu-platform"


def with_present_names(layer: Layer, beside: Iterable[type[Feature[Any]]]) -> Layer:
    """Return a layer whose settings have their present names, with a warning for each that had its former one."""
    for feature in beside:
        name, given = feature.spec.name, layer.settings.get(_FORMER, {})
        if not (former := {key: value for key, value in given.items() if key in feature.Args.model_fields}):
            continue
        kept = {key: value for key, value in given.items() if key not in former}
        settings = {**layer.settings, _FORMER: kept, name: {**former, **layer.settings.get(name, {})}}
        notes = [PlanNote("warning", _FORMER, f"{_FORMER}.{key} is {name}.{key} now") for key in former]
        layer = replace(layer, settings=settings, notes=(*layer.notes, *notes))
    return layer
