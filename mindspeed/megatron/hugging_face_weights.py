"""Weights of Hugging Face in the chunks of a model, through the package mbridge and the names of its layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from mindspeed.problems import Fix, Problem, RunError

_ENGINE_NAMES: Final = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
"""Names of Transformer Engine's layers for the norms of local ones, where a model has no such module of its own."""
_EMBEDDING: Final = "embedding.word_embeddings.weight"
_LOCAL_EXPERTS: Final = ".experts.local_experts."
_OTHER_MODEL: Final = Fix.advise("give the arguments of this model, or load a Megatron checkpoint")


class _Chunk:
    """A model chunk whose weights have the names that mbridge knows."""

    def __init__(self, chunk: Any, bridge: Any) -> None:
        self.decoder = chunk.decoder
        self._parameters = {_name(name, bridge): value for name, value in chunk.named_parameters()}
        self._state = {_name(name, bridge): value for name, value in chunk.state_dict().items() if "_extra_state" not in name}

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        return iter(self._parameters.items())


def load_weights(chunks: Sequence[Any], folder: str) -> None:
    """Copy the weights of a Hugging Face model into the chunks of this rank; every rank calls it.

    Raises RunError with MS602 for a model that has other layers than the chunks or a larger vocabulary, on all ranks that
    would exchange the weights and before they do.
    """
    bridge = bridge_of(chunks, folder)
    named = named_chunks(chunks, bridge)
    _check_vocabulary(bridge, folder)
    _check_stored(named, bridge, folder)
    with torch.no_grad():
        bridge.load_weights(named, folder)


def _check_vocabulary(bridge: Any, folder: str) -> None:
    size, padded, ranks = bridge.vocab_size, bridge.padded_vocab_size, bridge.config.tensor_model_parallel_size
    if padded < size:
        text = f"the padded vocabulary has {padded} rows, but the model in {folder} has vocab_size {size}"
        fix = Fix.give_option("--padded-vocab-size", -(-size // ranks) * ranks)
        raise RunError([Problem("MS602", text, where="--load", fix=fix)])


def _check_stored(chunks: Sequence[_Chunk], bridge: Any, folder: str) -> None:
    stored = {*bridge._get_safetensor_io(folder).load_hf_weight_names()}
    for chunk in chunks:
        for name in bridge._weight_name_mapping_mcore_local_to_global(chunk).values():
            if missing := [key for key in bridge._weight_name_mapping_mcore_to_hf(name) if key not in stored]:
                text = f"the weights in {folder} have no {missing[0]}, which {name} of this run's model is loaded from"
                raise RunError([Problem("MS602", text, where="--load", fix=_OTHER_MODEL)])


def named_chunks(chunks: Sequence[Any], bridge: Any) -> list[_Chunk]:
    """Return chunks whose weights have the names that a bridge knows."""
    from mbridge.core.util import unwrap_model

    return [_Chunk(unwrap_model(chunk), bridge) for chunk in chunks]


def _name(name: str, bridge: Any) -> str:
    """Return the name of a weight that mbridge knows: its own, or that in a layer of Transformer Engine."""
    if _LOCAL_EXPERTS in name:
        before, _, after = name.partition(_LOCAL_EXPERTS)
        expert, _, inside = after.partition(".")
        return f"{before}.experts.{inside}{expert}"
    name = name.replace(".mtp_model_layer.", ".transformer_layer.")  # the name since Megatron 0.17
    if "_extra_state" in name or _is_known(name, bridge):
        return name
    renamed = next((name.replace(part, new) for part, new in _ENGINE_NAMES.items() if part in name), name)
    if not _is_known(renamed, bridge):
        text = f"{name} has no counterpart in the Hugging Face model of type {bridge.hf_config.model_type}"
        raise RunError([Problem("MS602", text, where="--load", fix=_OTHER_MODEL)])
    return renamed


def _is_known(name: str, bridge: Any) -> bool:
    try:
        bridge._weight_name_mapping_mcore_to_hf(name)
    except (NotImplementedError, AssertionError):
        return False
    return True


def bridge_of(chunks: Sequence[Any], folder: str) -> Any:
    """Make mbridge's bridge of the model in a folder, with the configuration that the chunks have."""
    from mbridge.core.bridge import _MODEL_REGISTRY, Bridge
    from mbridge.core.safetensor_io import SafeTensorIO
    from megatron.core.utils import get_model_config
    from transformers import AutoConfig

    config, hugging_face = get_model_config(chunks[0]), AutoConfig.from_pretrained(folder)
    known: type[Bridge] = _MODEL_REGISTRY[hugging_face.model_type]

    class ChunkBridge(known):  # type: ignore[misc]
        def _build_config(self) -> Any:
            return config

        def _get_safetensor_io(self, weights_path: str) -> Any:
            if getattr(hugging_face, "quantization_config", None):
                return super()._get_safetensor_io(weights_path)
            return SafeTensorIO(str(Path(weights_path)))

    bridge = ChunkBridge(hugging_face, dtype=config.params_dtype, make_vocab_size_divisible_by=1)
    if getattr(hugging_face, "tie_word_embeddings", False):
        bridge._DIRECT_MAPPING = {**bridge._DIRECT_MAPPING, "output_layer.weight": bridge._DIRECT_MAPPING[_EMBEDDING]}
    bridge.vocab_size = hugging_face.vocab_size
    bridge.padded_vocab_size = _padded_vocabulary(chunks)
    return bridge


def _padded_vocabulary(chunks: Sequence[Any]) -> int:
    from mbridge.core.util import unwrap_model

    return int(unwrap_model(chunks[0]).vocab_size)
