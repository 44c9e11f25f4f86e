"""The gate of shared experts in the specs of all versions of Megatron."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec

from mindspeed.megatron.module_specs import with_modules, with_parts


class HiddenGate(SharedExpertMLP):  # type: ignore[misc]
    """Shared experts whose gate gives one number for each hidden value, from a weight [hidden, hidden]."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config, scalar = self.config, self.get_parameter("gate_weight")
        weight = torch.empty((config.hidden_size, config.hidden_size), dtype=torch.float32)
        if config.perform_initialization:
            config.init_method(weight)
        self.gate_weight = torch.nn.Parameter(weight.to(device=scalar.device, dtype=scalar.dtype))
        self.gate_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def with_gate(spec: Any, hidden: bool, by_config: bool) -> Any:
    """Copy a spec with a gate on shared experts, a parameter of the spec before Megatron 0.16, of the configuration since."""
    if hidden:
        spec = with_parts(spec, lambda name, part: HiddenGate if part is SharedExpertMLP else part)
    module = HiddenGate if hidden else SharedExpertMLP
    return spec if by_config else with_modules(spec, {module: ModuleSpec(module, params={"gate": True})})
