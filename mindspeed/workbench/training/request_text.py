"""The request of a job as the text of one job file. Light: `mindspeed lock` writes it without numpy and torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from mindspeed import registry
from mindspeed.engine.resolution.request import Layer
from mindspeed.engine.resolution.request_merge import remaining_features
from mindspeed.workbench.training.resume import merge_spellings


def job_file(layers: Sequence[Layer], train: Mapping[str, Mapping[str, Any]]) -> str:
    """Merge the layers into one job file."""
    owners = registry.catalog_for(name for layer in layers for name in (*layer.features, *layer.settings)).owners
    settings, world = merge_spellings(layers, owners)
    values = merged(train)
    if values.get("data"):
        values["data"] = os.path.abspath(values["data"])
    data: dict[str, Any] = {
        "features": remaining_features(layers),
        "without": list(dict.fromkeys(name for layer in layers for name in layer.without)),
        "settings": settings,
        "world": {name: value for name, value in world.items() if name != "world_size"},
        "train": {name: value for name, value in values.items() if name != "run" and value is not None},
    }
    for name in ("level", "strict", "only", "platform"):
        data[name] = next((value for layer in reversed(layers) if (value := getattr(layer, name)) is not None), None)
    return yaml.safe_dump({key: value for key, value in data.items() if value not in (None, [], {})}, sort_keys=False)


def merged(train: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The values that sources give together, the last one winning."""
    return {name: value for section in train.values() for name, value in section.items()}
