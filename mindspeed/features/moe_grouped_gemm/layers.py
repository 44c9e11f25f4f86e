"""Grouped experts in the place of Megatron's local ones."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.moe import experts as megatron_experts

from mindspeed.megatron.module_specs import with_parts
from mindspeed.moe.grouped_experts import ExpertProducts, GroupedExperts, SeparateExperts


def foreign_experts(feature: Any, spec: Any, config: Any) -> list[str]:
    """Name the experts of a layer specification that grouped products cannot replace; a stage of dense layers has none."""
    local = tuple(_local_experts())
    if feature.world.is_set("engine_over_local"):
        local = (*local, megatron_experts.TEGroupedMLP)
    names: list[str] = []

    def look(name: str, part: Any) -> Any:
        module = getattr(part, "module", getattr(part, "func", part))  # of a ModuleSpec or a partial
        if name == "experts" and not (isinstance(module, type) and issubclass(module, (ExpertProducts, *local))):
            names.append(getattr(module, "__name__", str(module)))
        return part

    with_parts(spec, look)
    return [f"the layer specification uses {name}, which is not one of Megatron's local experts" for name in names]


def _local_experts() -> set[type]:
    """Return Megatron's own classes of experts without Transformer Engine."""
    return {megatron_experts.SequentialMLP, getattr(megatron_experts, "GroupedMLP", megatron_experts.SequentialMLP)}


def with_grouped_experts(spec: Any, engine_over_local: bool) -> Any:
    """Copy a spec with single experts, and Megatron's own grouped ones, exchanged for `GroupedExperts`.

    Experts in the roles of Transformer Engine's keep their parameters.
    """
    known: dict[Any, type] = dict.fromkeys(_local_experts(), GroupedExperts)
    if engine_over_local:
        known[megatron_experts.TEGroupedMLP] = SeparateExperts

    def exchanged(name: str, part: Any) -> Any:
        return known.get(part, part) if isinstance(part, type) else part

    return with_parts(spec, exchanged)
