"""A configuration of megatron-core in the words of a plan: the fields of a job that it gives. Light, by attribute names."""

from __future__ import annotations

from typing import Any, Final

from mindspeed.job.fact import Field, Values
from mindspeed.job.fields import FIELDS

_TOLD_BY: Final[dict[str, list[Field]]] = {}
"""Fields by the attributes that they are read from."""
for _field in FIELDS.values():
    for _name in _field.built_names:
        _TOLD_BY.setdefault(_name, []).append(_field)


def world_of_config(config: Any) -> dict[str, Any]:
    """Return the fields of a job that a configuration gives, a TransformerConfig, OptimizerConfig or what has their names.

    A field whose attributes the configuration lacks, for its Megatron is older, is not given.
    """
    return world_of_attributes({name: getattr(config, name) for name in _TOLD_BY if hasattr(config, name)})


def world_of_attributes(values: Values) -> dict[str, Any]:
    """Return the fields of a job that these attributes of a configuration give."""
    known = dict.fromkeys(field for name in values for field in _TOLD_BY.get(name, ()))
    world = {field.name: field.of_attributes(values) for field in known}
    return {name: value for name, value in world.items() if value is not None}
