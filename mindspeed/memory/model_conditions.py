"""What only a built model or optimizer can decide for features of memory. Imported when it exists."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any

from mindspeed.memory.model_layers import blocks_of, chosen_layers, fully_recomputed
from mindspeed.plugins.feature import Feature


def missing_layers(feature: Feature[Any], chunks: Sequence[Any]) -> Iterator[str]:
    """Yield a sentence for sharded weights, and for model chunks that lack layers."""
    modules = [module for chunk in chunks for module in chunk.modules()]
    if any(type(module).__name__.endswith("FullyShardedDataParallel") for module in modules):
        yield f"weights are fully sharded (FSDP) and not present when {feature.spec.name} needs them"
    wanted = getattr(feature.args, "num_layers", None) or 1
    for block in blocks_of(chunks):
        count, taken = len(block.layers), min(fully_recomputed(block.config), len(block.layers))
        if wanted > count - taken:
            yield f"{wanted} layers are needed, but a model chunk has {count}, {taken} of them in block recomputation"


def fused_norms(feature: Feature[Any], chunks: Sequence[Any]) -> Iterator[str]:
    """Yield a sentence for each layer with a norm inside a fused linear layer."""
    from mindspeed.memory.norms import norms_of

    for layer in chosen_layers(chunks, getattr(feature.args, "num_layers", None)):
        if not norms_of(layer):
            yield f"layer {layer.layer_number} has a norm inside a fused linear layer"


def fused_activations(feature: Feature[Any], chunks: Sequence[Any]) -> Iterator[str]:
    """Yield a sentence for each layer whose activation is a part of another function."""
    from mindspeed.memory.activations import has_own_activation

    for layer in chosen_layers(chunks, getattr(feature.args, "num_layers", None)):
        if not has_own_activation(layer):
            yield f"the activation of layer {layer.layer_number} ({type(layer.mlp).__name__}) is part of another function"


def fused_parts(feature: Feature[Any], chunks: Sequence[Any]) -> Iterator[str]:
    """Yield a sentence where no layer has a norm or an activation apart."""
    from mindspeed.memory.activations import has_own_activation
    from mindspeed.memory.norms import norms_of

    layers = chosen_layers(chunks, None)
    if layers and not any(norms_of(layer) or has_own_activation(layer) for layer in layers):
        yield "every norm and every activation is part of another function"


def parts_of_attention(feature: Feature[Any], chunks: Sequence[Any]) -> Iterator[str]:
    """Yield a sentence for a module that no attention has, and for one whose input the residual needs too."""
    from megatron.core.transformer.identity_op import IdentityOp

    layers = chosen_layers(chunks, None)
    known = {name for layer in layers for name, _ in layer.self_attention.named_children()}
    for name in feature.args.modules:
        if layers and name not in known:
            near = difflib.get_close_matches(name, sorted(known), 3, 0.5) or sorted(known)
            yield f"no attention of the model has a module {name}; use {', '.join(near)}"
    if "linear_qkv" in feature.args.modules and any(isinstance(layer.input_layernorm, IdentityOp) for layer in layers):
        yield "linear_qkv contains the norm, whose input the residual needs too; leave it out of the modules"


def unsuited_optimizers(feature: Feature[Any], optimizer: Any) -> Iterator[str]:
    """Yield a sentence for an optimizer, chained or not, that works on whole matrices or on sharded weights."""
    members = [optimizer, *getattr(optimizer, "chained_optimizers", ())]
    if any(type(member).__name__ == "LayerWiseDistributedOptimizer" for member in members):
        yield "the optimizer is split by layers and does not update each element by itself"
    if any(getattr(getattr(member, "ddp_config", None), "use_megatron_fsdp", False) for member in members):
        yield "Megatron FSDP manages main weights by itself"
