"""Fields of the job that follow from several values of Megatron, or from one in another form. Named functions, light."""

from __future__ import annotations

import re
from typing import Any, Final

from mindspeed.job.fact import Names, Values

ACTIVATIONS: Final = ("gelu", "silu", "relu", "squared_relu", "quick_gelu")
"""Activation functions of an MLP."""

ROTARY: Final = ("rope", "mrope", "yarn")
"""Kinds of ``position_embedding_type`` that are rotary."""


def any_set(values: Values, names: Names) -> bool:
    """Return whether one of these is set."""
    return any(bool(values.get(name)) for name in names)


def any_given(values: Values, names: Names) -> bool:
    """Return whether one of these is given, 0 included."""
    return any(values.get(name) is not None for name in names)


def number_or_zero(values: Values, names: Names) -> int:
    """Return the whole number, 0 where Megatron has none."""
    return values.get(names[0]) or 0


def of_latent_attention(values: Values, names: Names) -> int | None:
    """Return a width that Megatron-LM's parser has for every model, where attention is latent."""
    return (values.get(names[0]) or 0) if values.get("multi_latent_attention") else None


def of_sparse_attention(values: Values, names: Names) -> int | None:
    """Return a size of the indexer, where attention is sparse: the second name holds it."""
    return values.get(names[1]) if values.get(names[0]) == "dsa" else 0


def sequence_parallel(values: Values, names: Names) -> bool:
    """Return whether ranks split the sequence; Megatron-LM switches it off without tensor parallelism."""
    return bool(values.get(names[0])) and values.get("tensor_model_parallel_size") != 1


def chunks(values: Values, names: Names) -> int | None:
    """Count the model chunks of a stage."""
    if layout := values.get("pipeline_model_parallel_layout"):
        return chunks_of_layout(layout, values.get("pipeline_model_parallel_size") or 1) if isinstance(layout, str) else None
    if known := values.get("virtual_pipeline_model_parallel_size") or values.get("num_virtual_stages_per_pipeline_rank"):
        return int(known)
    per_chunk, layers = values.get("num_layers_per_virtual_pipeline_stage"), values.get("num_layers")
    if per_chunk is None:
        return 1
    if not layers or not per_chunk:
        return None
    counted = layers + sum(bool(values.get(f"account_for_{end}_in_pipeline_split")) for end in ("embedding", "loss"))
    return int(counted // (values.get("pipeline_model_parallel_size") or 1) // per_chunk)


def chunks_of_layout(layout: str, stages: int) -> int:
    """Count the model chunks of a stage in a layout."""
    return max(1, len(_chunks_of_text(layout)) // stages)


def _chunks_of_text(layout: str) -> list[str]:
    """Return the letters of each model chunk in a layout such as ``Et|(tt|)*6L``, whose chunks end with ``|``."""
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        layout = re.sub(pattern, lambda found: found[1] * int(found[2]), layout.replace(",", ""))
    return layout.split("|")


def mtp_standalone(values: Values, names: Names) -> bool:
    """Return whether a layout, a text or Megatron's object, has predictions of further tokens outside of the last stage."""
    layout = values.get(names[0]) or ""
    if isinstance(layout, str):
        return any("m" in chunk and "L" not in chunk for chunk in _chunks_of_text(layout))
    stages = [{kind.name for kind in stage} for rank in layout.layout for stage in rank]
    return any("mtp" in stage and "loss" not in stage for stage in stages)


def built_chunks(values: Values, names: Names) -> int | None:
    """Count the model chunks of a stage of a configuration; a layout may deal out several that it does not tell."""
    return values.get(names[0]) or (None if values.get("pipeline_model_parallel_layout") else 1)


def query_groups(values: Values, names: Names) -> int | None:
    """Return the key/value heads; as many as query heads where they are not grouped."""
    grouped = values.get("group_query_attention")
    return values.get("num_query_groups") if grouped else values.get("num_attention_heads")


def built_query_groups(values: Values, names: Names) -> int | None:
    """Return the key/value heads of a configuration."""
    return values.get("num_query_groups") or values.get("num_attention_heads")


def mlp_size(values: Values, names: Names) -> int | None:
    """Return the hidden size of the MLP: the given one, or the one that Megatron makes."""
    if (given := values.get("ffn_hidden_size")) is not None:
        return int(given)
    if (hidden := values.get("hidden_size")) is None:
        return None
    return int(4 * hidden * 2 / 3 / 64) * 64 if values.get("swiglu") else 4 * int(hidden)


def expert_size(values: Values, names: Names) -> int | None:
    """Return the hidden size of one expert: the given one, or that of the MLP, which Megatron takes for it."""
    given: int | None = values.get("moe_ffn_hidden_size")
    return given if given is not None or not values.get("num_experts") else mlp_size(values, names)


def activation(values: Values, names: Names) -> str:
    """Name the activation function of the MLP."""
    if values.get("swiglu"):
        return "silu"
    return "squared_relu" if values.get("squared_relu") else "quick_gelu" if values.get("quick_geglu") else "gelu"


def built_activation(values: Values, names: Names) -> str | None:
    """Name the activation function of a configuration; None for a function that no argument selects."""
    name = getattr(values.get("activation_func"), "__name__", None)
    return name if name in ACTIVATIONS else None


def rotary(values: Values, names: Names) -> bool:
    """Return whether positions are rotary."""
    return bool(values.get("use_rotary_position_embeddings")) or values.get("position_embedding_type") in ROTARY


def qkv_bias(values: Values, names: Names) -> bool:
    """Return whether only the projection of queries, keys and values has a bias; where all have, Megatron-LM sets both."""
    return bool(values.get(names[0])) and not values.get("add_bias_linear")


def distributed_optimizer(values: Values, names: Names) -> bool:
    """Return whether Megatron's distributed optimizer shards states.

    Optimizers of whole matrices and frozen layers do without, the first version of Megatron FSDP always has it.
    """
    if values.get("freeze_all_layers") or optimizer(values, ("optimizer",)) not in (None, "adam", "sgd"):
        return False
    return bool(values.get(names[0]) or (values.get("use_megatron_fsdp") and values.get("megatron_fsdp_version") == 1))


def shared_gradient_buffer(values: Values, names: Names) -> bool:
    """Return whether gathered weights use the gradient buffer, which Megatron FSDP does not have."""
    return bool(values.get(names[0])) and not values.get("use_megatron_fsdp")


def optimizer(values: Values, names: Names) -> str | None:
    """Name the optimizer, by its present name."""
    given: str | None = values.get(names[0])
    return "muon" if given == "dist_muon" else given


def cuda_graphs(values: Values, names: Names) -> bool:
    """Return whether layers are captured as CUDA graphs, by one of the names that it has had."""
    recorded = values.get("cuda_graph_impl") not in (None, "none")
    return bool(recorded or values.get("enable_cuda_graph") or values.get("external_cuda_graph"))


def transformer_engine_layers(values: Values, names: Names) -> bool | None:
    """Return whether layers are those of Transformer Engine."""
    return None if (layers := values.get("transformer_impl")) is None else layers != "local"


def transformer_engine_experts(values: Values, names: Names) -> bool | None:
    """Return whether experts are Transformer Engine's grouped ones."""
    if (layers := values.get("transformer_impl")) is None:
        return None
    grouped = values.get("num_experts") and values.get("moe_grouped_gemm") and not values.get("moe_use_legacy_grouped_gemm")
    return bool(grouped and layers == "transformer_engine")


def weight_shards(values: Values, names: Names) -> int:
    """Return how many ranks share a weight in addition to tensor-parallel ranks, which Megatron's argument counts too."""
    return max(1, (values.get(names[0]) or 1) // (values.get("tensor_model_parallel_size") or 1))


def built_weight_shards(values: Values, names: Names) -> int:
    """Return how many ranks share a weight in addition to tensor-parallel ranks, in a configuration."""
    return values.get("gtp_weight_remat_size") or 1


def low_precision_recipe(values: Values, names: Names) -> str:
    """Return the recipe of products in fp8, fp4, or none."""
    if values.get("fp4"):
        return "fp4"
    recipe = values.get(names[0]) or "delayed"
    return str(getattr(recipe, "value", recipe)) if values.get("fp8") else "none"


def low_precision_weights(values: Values, names: Names) -> bool:
    """Return whether weights are kept in fp8 or fp4."""
    kept = {name[:3] for name in names if values.get(name)}
    return any(values.get(name) for name in kept)


def dtype(values: Values, names: Names) -> str:
    """Name the type of the weights."""
    return "bf16" if values.get("bf16") else "fp16" if values.get("fp16") else "fp32"


def tied_embeddings(values: Values, names: Names) -> bool:
    """Return whether the embedding and the output layer share one weight."""
    return not values.get("untie_embeddings_and_output_weights")


def recompute_granularity(values: Values, names: Names) -> str:
    """Return how much is recomputed: none, selective or full."""
    return "selective" if values.get("recompute_activations") else str(values.get("recompute_granularity") or "none")


def recompute_modules(values: Values, names: Names) -> tuple[str, ...]:
    """Return the modules of a layer that selective recomputation takes: core attention where none is named."""
    return tuple(values.get(names[0]) or ("core_attn",))


def balancing(values: Values, names: Names) -> tuple[str, ...]:
    """Return how the load of experts is balanced, by one word or several."""
    given: Any = values.get(names[0]) or "aux_loss"
    return (given,) if isinstance(given, str) else tuple(given)


def layers_with_experts(values: Values, names: Names) -> int | None:
    """Count the layers with experts, which are every so many or those of a list of zeros and ones; None where all have.

    A command line gives the list as an expression such as ``[0]*1+[1]*2``, which Megatron-LM's parser computes.
    """
    frequency, layers, experts = (values.get(name) for name in names)
    if isinstance(frequency, str):
        frequency = listed(frequency)
    if frequency in (None, 0, 1) or not layers or not experts:
        return None
    return sum(map(bool, frequency)) if isinstance(frequency, list | tuple) else -(-layers // int(frequency))


def expert_layers(frequency: str, layers: int) -> list[bool] | None:
    """Return for each layer whether it has experts, from the text of ``--moe-layer-freq``; None for another expression."""
    every = listed(frequency)
    if isinstance(every, int):
        return [layer % every == 0 for layer in range(layers)] if every else None
    return None if every is None else [*map(bool, every)]


def listed(text: str) -> list[int] | int | None:
    """Compute a whole number, or an expression of lists; None for another expression."""
    if text.strip().isdigit():
        return int(text)
    from mindspeed.job.list_expression import computed

    found: list[int] | int | None = computed(text)
    return found
