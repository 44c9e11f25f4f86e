"""``mindspeed features schema``: the JSON Schema of a job file, for editors and for checks without mindspeed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from mindspeed.cli.output import json_option, print_json
from mindspeed.plugins.world import FIELDS, PLATFORMS

if TYPE_CHECKING:
    from mindspeed.plugins.discovery import Catalog
    from mindspeed.plugins.feature import Feature

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
_TYPES: Final = {int: "integer", str: "string", bool: "boolean"}
Schema = dict[str, Any]


@click.command()
@json_option
def schema() -> None:
    """Print the JSON Schema (2020-12) of a job file.

    It knows every installed feature, its settings, their defaults and descriptions. Tell an editor of it by a first line in
    the job file:

    # yaml-language-server: $schema=mindspeed.schema.json
    """
    from mindspeed.registry import catalog

    print_json(job_schema(catalog()))


def job_schema(known: Catalog) -> Schema:
    """The schema of a job file with the features of a catalog."""
    from mindspeed.training.config import TrainConfig

    names: Schema = {"type": ["array", "null"], "uniqueItems": True, "items": {"$ref": "#/$defs/feature"}}
    feature: Schema = {
        "enum": list(known.usable),
        "enumDescriptions": [known.specs[name].summary for name in known.usable],  # shown by editors, unknown to checkers
    }
    definitions: dict[str, Schema] = {"feature": feature}
    features = [*_base(), *(known.feature(name) for name in known.usable)]
    settings = {feature.spec.name: _settings(feature, definitions) for feature in features}
    return {
        "$schema": DIALECT,
        "title": "mindspeed job file",
        "description": "What to train and how: the same file for features check, plan, explain and for pretrain.",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "features": names | {"description": "features to switch on"},
            "without": names | {"description": "features to leave out"},
            "settings": {
                "description": "settings by feature",
                "type": ["object", "null"],
                "additionalProperties": False,
                "properties": settings,
            },
            "world": {
                "description": "sizes and the shape of the model",
                "type": ["object", "null"],
                "additionalProperties": False,
                "properties": {name: _size(name) for name in FIELDS if name not in ("platform", "megatron")},
            },
            "level": {
                "description": "0: only what Megatron has; 1: and all that is safe here; 2: and what is asked for",
                "enum": [0, 1, 2],
                "default": 2,
            },
            "platform": {"description": "device to plan for; what is here if not given", "enum": list(PLATFORMS)},
            "strict": {
                "description": "add no requirement silently; what cannot be checked is a problem",
                "type": "boolean",
                "default": False,
            },
            "train": _moved(TrainConfig.model_json_schema(), definitions) | {"description": "how pretrain trains"},
        },
        "$defs": definitions,
    }


def _base() -> list[type[Feature[Any]]]:
    """The features of the base plans, which a job can set but not name."""
    from mindspeed.registry import base_features

    found = {feature.spec.name: feature for platform in PLATFORMS for feature in base_features(platform)}
    return [feature for feature in found.values() if feature.Args.model_fields]


def _settings(feature: type[Feature[Any]], definitions: dict[str, Schema]) -> Schema:
    found = _moved(feature.Args.model_json_schema(), definitions, f"{feature.spec.name}.")
    found.pop("required", None)  # the command line or a variable may give what this file does not
    return found | {"title": feature.spec.name, "description": feature.spec.summary}


def _moved(schema: Schema, definitions: dict[str, Schema], prefix: str = "train.") -> Schema:
    """A model's schema with its own definitions moved among those of the whole, under names of its own."""
    own = schema.pop("$defs", {})
    for key, value in own.items():
        definitions[prefix + key] = _renamed(value, prefix)
    found: Schema = _renamed(schema, prefix)
    return found


def _renamed(part: Any, prefix: str) -> Any:
    if isinstance(part, dict):
        return {
            key: value.replace("#/$defs/", f"#/$defs/{prefix}") if key == "$ref" else _renamed(value, prefix)
            for key, value in part.items()
        }
    return [_renamed(item, prefix) for item in part] if isinstance(part, list) else part


def _size(name: str) -> Schema:
    kind, meaning = FIELDS[name]
    least = {"minimum": 0 if name == "num_experts" else 1} if kind is int else {}
    return {"type": _TYPES[kind], "description": meaning, **least}
