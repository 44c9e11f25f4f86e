"""``mindspeed features schema``: the JSON Schema of a job file, for editors and for checks without mindspeed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from mindspeed.cli.output import json_option, print_json
from mindspeed.files.tables import table_beside
from mindspeed.job.fields import FIELDS, PLATFORMS

if TYPE_CHECKING:
    from pydantic import BaseModel

    from mindspeed.plugins.discovery import Catalog
    from mindspeed.plugins.feature import Feature

_TYPES: Final = {int: "integer", float: "number", str: "string", bool: "boolean"}
Schema = dict[str, Any]


@click.command()
@json_option
def schema() -> None:
    """Print the JSON Schema (2020-12) of a job file.

    The schema contains every installed feature, its settings, their defaults and descriptions. Editors read it if the first
    line of the job file is:

    # yaml-language-server: $schema=mindspeed.schema.json
    """
    from mindspeed.registry import catalog

    print_json(job_schema(catalog()))


def job_schema(known: Catalog) -> Schema:
    """The schema of a job file with the features of a catalog."""
    from mindspeed.workbench.training.config import TrainConfig

    summaries = [known.feature(name).summary() for name in known.usable]  # shown by editors, unknown to checkers
    definitions: dict[str, Schema] = {"feature": {"enum": list(known.usable), "enumDescriptions": summaries}}
    schema: Schema = table_beside(__file__)
    properties = schema["properties"]
    features = [*_base(), *(known.feature(name) for name in known.usable)]
    properties["settings"]["properties"] = {feature.spec.name: _settings(feature, definitions) for feature in features}
    sizes = (name for name in FIELDS if name not in ("platform", "megatron"))
    properties["world"]["properties"] = {name: _size(name) for name in sizes}
    properties["platform"]["enum"] = list(PLATFORMS)
    properties["train"] = _schema_of(TrainConfig, definitions, "train.") | {"description": "how pretrain trains"}
    return schema | {"$defs": definitions}


def _base() -> list[type[Feature[Any]]]:
    """The features of the base plans, which a job can set but not name."""
    from mindspeed.registry import base_features

    features = {feature for platform in PLATFORMS for feature in base_features(platform)}
    return sorted((feature for feature in features if feature.Args.model_fields), key=lambda feature: feature.spec.name)


def _settings(feature: type[Feature[Any]], definitions: dict[str, Schema]) -> Schema:
    schema = _schema_of(feature.Args, definitions, f"{feature.spec.name}.")
    schema.pop("required", None)  # the command line or a variable may give what this file does not
    return schema | {"title": feature.spec.name, "description": feature.summary()}


def _schema_of(model: type[BaseModel], definitions: dict[str, Schema], prefix: str) -> Schema:
    """The schema of a model, whose own definitions go among those of the whole, under names with a prefix."""
    schema = model.model_json_schema(ref_template=f"#/$defs/{prefix}{{model}}")
    definitions |= {prefix + name: own for name, own in schema.pop("$defs", {}).items()}
    return schema


def _size(name: str) -> Schema:
    field = FIELDS[name]
    if field.kind is tuple:
        return {"type": "array", "items": {"type": "string"}, "minItems": 1, "description": field.meaning}
    least = {} if field.least is None else {"minimum": field.least}
    return {"type": _TYPES[field.kind], "description": field.meaning, **least}
