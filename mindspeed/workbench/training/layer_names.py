"""The names that Megatron gives to the same parameters in its local layers and in Transformer Engine's. Light.

The norm before an MLP is a part of its first linear layer, or a module of its own. Latent attention has two more such norms.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Final

from mindspeed.engine.planning.checkpoint_layers import LayerKind

_OPTIMIZER: Final = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.\w+\.")
"""Prefix of a parameter's name in the key of its optimizer state."""
_OF_LAYER: Final = re.compile(
    r"(?P<layer>.*?)"
    r"(?:pre_mlp_layernorm\.|mlp\.linear_fc1\.layer_norm_|self_attention\.(?P<side>q|kv)_layernorm\."
    r"|self_attention\.linear_(?P<engine_side>q|kv)_up_proj\.layer_norm_)"
    r"(?P<last>weight|bias)"
)
_NORM: Final = re.compile(r".*(?:layernorm|final_norm|enorm|hnorm)")
_STATELESS: Final = re.compile(r".*(?:_embeddings|output_layer|router|gate)")
"""Modules that are not Transformer Engine's, or whose state Megatron leaves out."""
_PREDICTION: Final = re.compile(r"(mtp\.layers\.\d+\.transformer_layer\.self_attention)\.linear_proj")
STATE: Final = "._extra_state"


def renamed(key: str, parameters: Collection[str], kind: LayerKind) -> str:
    """Return the key of a tensor in a checkpoint of these layers; ``parameters`` are the keys of all."""
    optimizer = match.group() if (match := _OPTIMIZER.match(key)) else ""
    name = _OF_LAYER.fullmatch(key, len(optimizer))
    if name is None:
        return key
    layer, last = name["layer"], name["last"]
    is_latent = f"{layer}self_attention.linear_kv_up_proj.weight" in parameters
    if side := name["side"] or name["engine_side"]:
        if not is_latent:
            return key
        part = {"local": f"{side}_layernorm.", "transformer-engine": f"linear_{side}_up_proj.layer_norm_"}[kind]
        return f"{optimizer}{layer}self_attention.{part}{last}"
    is_module = is_latent if kind == "local" else f"{layer}mlp.router.weight" in parameters
    return f"{optimizer}{layer}{'pre_mlp_layernorm.' if is_module else 'mlp.linear_fc1.layer_norm_'}{last}"


def states(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the key and the shape of each extra state that Transformer Engine's layers with these parameters have.

    A module has one for each layer, and for each expert, whose parameters are parts of one tensor.
    """
    for key, shape in shapes.items():
        module, _, last = key.rpartition(".")
        if last != "weight" or _OPTIMIZER.match(key) or _STATELESS.fullmatch(module):
            continue
        yield module + STATE, shape[: -1 if _NORM.fullmatch(module) else -2] or (1,)
        if of_prediction := _PREDICTION.fullmatch(module):  # Megatron saves it of these layers alone
            yield f"{of_prediction[1]}.core_attention{STATE}", (1,)


def is_local(state: str) -> bool:
    """Return whether local layers have an extra state; ``state`` is its key."""
    module = state.partition(STATE)[0]
    return not (_NORM.fullmatch(module) or module.endswith("core_attention"))
