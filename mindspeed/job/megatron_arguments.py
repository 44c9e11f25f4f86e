"""Megatron-LM's arguments in the words of a plan: the world's sizes, features and their settings. Light, data only.

Arguments are named by their *dest*, the attribute that Megatron-LM's parser gives them (``tensor_model_parallel_size``).
The same tables serve what a command line announces and what Megatron-LM has made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from mindspeed.job.world import LATENT_WIDTHS

Values = Mapping[str, Any]
"""Values of arguments by dest; what is not known is missing or None."""

WORLD: Final[dict[str, str]] = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "kv_channels": "kv_channels",
    "moe_ffn_hidden_size": "moe_ffn_hidden_size",
    "moe_router_topk": "router_topk",
    "padded_vocab_size": "vocab_size",
    "seq_length": "seq_length",
    "micro_batch_size": "micro_batch_size",
    "global_batch_size": "global_batch_size",
    "normalization": "normalization",
    "add_bias_linear": "linear_bias",
    "multi_latent_attention": "multi_latent_attention",
}
"""Arguments that are a value of the world as they stand."""


@dataclass(frozen=True, slots=True)
class Derived:
    """A value of the world that follows from several arguments; ``names`` are their dests, the deciding one first."""

    field: str
    names: tuple[str, ...]
    compute: Callable[[Values], Any]


def _chunks(values: Values) -> int | None:
    if known := values.get("virtual_pipeline_model_parallel_size") or values.get("num_virtual_stages_per_pipeline_rank"):
        return int(known)
    per_chunk, layers = values.get("num_layers_per_virtual_pipeline_stage"), values.get("num_layers")
    if per_chunk is None:
        return None if values.get("pipeline_model_parallel_layout") else 1
    return layers // (values.get("pipeline_model_parallel_size") or 1) // per_chunk if layers and per_chunk else None


def _query_groups(values: Values) -> int | None:
    grouped = values.get("group_query_attention")
    return values.get("num_query_groups") if grouped else values.get("num_attention_heads")


def _mlp_size(values: Values) -> int | None:
    hidden = values.get("hidden_size")
    if values.get("ffn_hidden_size") is not None or hidden is None:
        return None
    return int(4 * hidden * 2 / 3 / 64) * 64 if values.get("swiglu") else 4 * int(hidden)


def _activation(values: Values) -> str | None:
    if values.get("swiglu"):
        return "silu"
    return "squared_relu" if values.get("squared_relu") else "quick_gelu" if values.get("quick_geglu") else "gelu"


_ROTARY: Final = ("rope", "mrope", "yarn")


def _rotary(values: Values) -> bool:
    return bool(values.get("use_rotary_position_embeddings")) or values.get("position_embedding_type") in _ROTARY


def _graphs(values: Values) -> bool:
    recorded = values.get("cuda_graph_impl") not in (None, "none")
    return bool(recorded or values.get("enable_cuda_graph") or values.get("external_cuda_graph"))


def _transformer_engine_experts(values: Values) -> bool | None:
    if (layers := values.get("transformer_impl")) is None:
        return None
    grouped = values.get("num_experts") and values.get("moe_grouped_gemm") and not values.get("moe_use_legacy_grouped_gemm")
    return bool(grouped and layers == "transformer_engine")


def _dtype(values: Values) -> str:
    return "bf16" if values.get("bf16") else "fp16" if values.get("fp16") else "fp32"


def _of_latent_attention(name: str, values: Values) -> int | None:
    """A width that Megatron-LM's parser has for every model."""
    return (values.get(name) or 0) if values.get("multi_latent_attention") else None


DERIVED: Final = (
    Derived("vpp", ("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"), _chunks),
    Derived("num_query_groups", ("num_query_groups", "group_query_attention"), _query_groups),
    Derived("ffn_hidden_size", ("ffn_hidden_size", "hidden_size"), _mlp_size),
    Derived("num_experts", ("num_experts",), lambda values: values.get("num_experts") or 0),
    Derived(
        "shared_expert_hidden_size",
        ("moe_shared_expert_intermediate_size",),
        lambda values: values.get("moe_shared_expert_intermediate_size") or 0,
    ),
    Derived(
        "tied_embeddings",
        ("untie_embeddings_and_output_weights",),
        lambda values: not values.get("untie_embeddings_and_output_weights"),
    ),
    Derived("mtp_num_layers", ("mtp_num_layers",), lambda values: values.get("mtp_num_layers") or 0),
    Derived("grouped_experts", ("moe_grouped_gemm",), lambda values: bool(values.get("moe_grouped_gemm"))),
    Derived("transformer_engine_experts", ("transformer_impl", "moe_grouped_gemm"), _transformer_engine_experts),
    Derived(
        "expert_capacity_factor",
        ("moe_expert_capacity_factor",),
        lambda values: float(values.get("moe_expert_capacity_factor") or 0),
    ),
    Derived(
        "padded_experts",
        ("moe_pad_expert_input_to_capacity",),
        lambda values: bool(values.get("moe_pad_expert_input_to_capacity")),
    ),
    Derived("latent_expert_size", ("moe_latent_size",), lambda values: values.get("moe_latent_size") or 0),
    Derived(
        "overlapped_micro_batches",
        ("overlap_moe_expert_parallel_comm",),
        lambda values: bool(values.get("overlap_moe_expert_parallel_comm")),
    ),
    Derived("low_precision", ("fp8", "fp4"), lambda values: bool(values.get("fp8") or values.get("fp4"))),
    Derived("cuda_graphs", ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"), _graphs),
    Derived(
        "gated_linear_unit",
        ("swiglu", "quick_geglu"),
        lambda values: bool(values.get("swiglu") or values.get("quick_geglu")),
    ),
    Derived("activation", ("swiglu", "squared_relu", "quick_geglu"), _activation),
    *(Derived(name, (name,), partial(_of_latent_attention, name)) for name in ("q_lora_rank", *LATENT_WIDTHS)),
    Derived("rotary", ("position_embedding_type", "use_rotary_position_embeddings"), _rotary),
    Derived("dtype", ("bf16", "fp16"), _dtype),
)
"""Values of the world that follow from several arguments."""

OF_PLATFORMS: Final = frozenset({"transformer_impl"})
"""Arguments whose default is another one on some platforms: they decide a value of the world only where they are given."""


def world_of(values: Values) -> dict[str, tuple[Any, tuple[str, ...]]]:
    """``{field: (value, dests that decide it)}`` for every value of the world that these arguments give."""
    world: dict[str, tuple[Any, tuple[str, ...]]] = {
        field: (values[dest], (dest,)) for dest, field in WORLD.items() if values.get(dest) is not None
    }
    for derived in DERIVED:
        value = derived.compute(values)
        if value is not None:
            world[derived.field] = (value, derived.names)
    return world


def dests_of(field: str) -> tuple[str, ...]:
    """Return the arguments that give a value of the world."""
    plain = (dest for dest, known in WORLD.items() if known == field)
    return (*plain, *(dest for derived in DERIVED if derived.field == field for dest in derived.names))


@dataclass(frozen=True, slots=True)
class Target:
    """The argument of Megatron-LM that stands for an argument of a configuration, with ``negated`` meaning its opposite."""

    dest: str
    negated: bool = False

    def as_argument(self, value: Any) -> Any:
        """Translate a configuration's ``value`` into Megatron-LM's argument."""
        return not value if self.negated else list(value) if isinstance(value, tuple) else value


RENAMED: Final[dict[str, Target]] = {
    "grad_reduce_in_fp32": Target("accumulate_allreduce_grads_in_fp32"),
    "bucket_size": Target("ddp_bucket_size"),
    "num_moe_experts": Target("num_experts"),
    "virtual_pipeline_model_parallel_size": Target("num_virtual_stages_per_pipeline_rank"),
    "persist_layer_norm": Target("no_persist_layer_norm", negated=True),
}
"""Arguments of Megatron's configurations that Megatron-LM calls otherwise; all others have one name."""

OF_TRAINING: Final = (
    "create_attention_mask_in_dataloader",
    "reset_attention_mask",
    "reset_position_ids",
    "distributed_backend",
    "transformer_impl",
    "dist_ckpt_optim_fully_reshardable",
)
"""Arguments that only Megatron-LM has, no configuration of megatron-core."""


def target_of(argument: str, values: Values) -> Target:
    """Find Megatron-LM's argument for one of a configuration; ``values`` are the arguments that it has."""
    if argument == "bias_activation_fusion":
        return Target("bias_swiglu_fusion" if values.get("swiglu") else "bias_gelu_fusion")
    return RENAMED.get(argument, Target(argument))
