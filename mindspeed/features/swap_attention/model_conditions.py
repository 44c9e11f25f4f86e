"""Conditions of swap-attention that only a built model can decide, imported when it exists."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.transformer.identity_op import IdentityOp

from mindspeed import plugins as ms
from mindspeed.memory.model_layers import chosen_layers


def parts_of_attention(feature: ms.Feature[Any], chunks: Sequence[Any]) -> Iterator[str]:
    """Yield a sentence for a module that no attention has, and for one whose input the residual needs too."""
    layers = chosen_layers(chunks, None, "self_attention")
    known = {name for layer in layers for name, _ in layer.self_attention.named_children()}
    modules = feature.args.modules or ()
    for name in modules:
        if layers and name not in known:
            near = difflib.get_close_matches(name, sorted(known), 3, 0.5) or sorted(known)
            yield f"no attention layer of the model has a module {name}; use {', '.join(near)}"
    if "linear_qkv" in modules and any(isinstance(layer.input_layernorm, IdentityOp) for layer in layers):
        yield (
            "linear_qkv includes the norm, so its input cannot be offloaded: the residual connection needs it too; "
            "remove linear_qkv from the modules"
        )
