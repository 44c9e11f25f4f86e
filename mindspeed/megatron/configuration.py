"""Configurations of megatron-core as values, which are read and judged without torch. Light."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any, Final

from mindspeed.job.world import FIELDS, World

_CONFIG: Final = "megatron.core.transformer.transformer_config"
DTYPES: Final = {"fp32": "torch:float32", "bf16": "torch:bfloat16", "fp16": "torch:float16"}
_SHAPE: Final = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("normalization", "gated_linear_unit", "linear_bias", "mtp_num_layers"),
)
EXPERT_FIELDS: Final = (
    *("moe_ffn_hidden_size", "router_topk", "shared_expert_hidden_size"),
    *("expert_capacity_factor", "padded_experts", "grouped_experts"),
)
"""Fields that only a model with experts has. Like those above, each is an attribute of Megatron's configuration."""


@dataclass(frozen=True, slots=True)
class BuiltConfiguration:
    """Hold a configuration class, ``module:name``, and its values; ``symbols`` are values by their ``module:name``."""

    kind: str
    values: Mapping[str, Any]
    symbols: Mapping[str, str] = field(default_factory=dict)

    def made(self) -> Any:
        """Make the configuration, which imports megatron."""
        symbols = {name: resolve_name(symbol) for name, symbol in self.symbols.items()}
        return resolve_name(self.kind)(**self.values, **symbols)


def gpt_configuration(world: World, dropout: float, **values: Any) -> BuiltConfiguration:
    """The model's shape as Megatron's configuration, without any size of a layout; ``values`` win."""
    known = world.known()
    shape = {}
    for name in (*_SHAPE, "num_experts", *EXPERT_FIELDS) if world.num_experts else _SHAPE:
        if name in known:
            is_none = FIELDS[name].least == 0 and not known[name]
            shape[FIELDS[name].built_names[0]] = None if is_none else known[name]
    fixed = {
        "attention_dropout": dropout,
        "hidden_dropout": dropout,
        "masked_softmax_fusion": False,
        "bf16": world.dtype == "bf16",
        "fp16": world.dtype == "fp16",
    }
    if world.is_hybrid:
        fixed["is_hybrid_model"] = True
    kind = "MLATransformerConfig" if world.is_set("multi_latent_attention") else "TransformerConfig"
    dtype = DTYPES[world.dtype]
    symbols = {
        "activation_func": f"torch.nn.functional:{world.activation}",
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
    }
    return BuiltConfiguration(f"{_CONFIG}:{kind}", {**shape, **fixed, **values}, symbols)
