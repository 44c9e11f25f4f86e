"""A configuration with experts and specs of layers, as far as the conditions of features read it."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any


@dataclass(frozen=True)
class Dense:
    """The submodules of a dense layer."""

    mlp: Any = None


@dataclass(frozen=True)
class Sparse:
    """The submodules of a layer with experts."""

    experts: Any


def config(**values: Any) -> SimpleNamespace:
    """The defaults of Megatron with ``values`` in their place."""
    defaults = {
        "num_moe_experts": 4,
        "moe_token_dispatcher_type": "alltoall",
        "moe_pad_expert_input_to_capacity": False,
        "recompute_granularity": None,
        "recompute_modules": None,
    }
    return SimpleNamespace(**defaults | values)
