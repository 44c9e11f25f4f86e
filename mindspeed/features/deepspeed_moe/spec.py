"""The layer in the place of Megatron's, with its options."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec

from mindspeed.features.deepspeed_moe.layers import CapacityMoELayer
from mindspeed.megatron.module_specs import with_modules
from mindspeed.moe.capacity import CapacityOptions


def with_capacity(spec: Any, args: Any) -> Any:
    """Exchange ``MoELayer`` in a spec for the layer with a capacity, and give it the feature's settings."""
    settings = args.model_dump(exclude={"interval"})
    settings["eval_capacity_factor"] = args.eval_capacity_factor or args.capacity_factor
    layer = ModuleSpec(module=CapacityMoELayer, params={"options": CapacityOptions(**settings)})
    return with_modules(spec, {MoELayer: layer})
