"""A configuration of megatron-core in the words of a plan: the fields of a job that it gives. Light, by attribute names."""

from __future__ import annotations

from typing import Any, Final

from mindspeed.job.fields import FIELDS

_ATTRIBUTES: Final = tuple(dict.fromkeys(name for field in FIELDS.values() for name in field.fact.built_names))


def world_of_config(config: Any) -> dict[str, Any]:
    """Return the fields of a job that a configuration gives, a TransformerConfig, OptimizerConfig or what has their names.

    A field whose attributes the configuration lacks, for its Megatron is older, is not given.
    """
    values = {name: getattr(config, name) for name in _ATTRIBUTES if hasattr(config, name)}
    world = {name: field.of_attributes(values) for name, field in FIELDS.items()}
    return {name: value for name, value in world.items() if value is not None}
