"""The model and the layers that a distributed checkpoint names: Megatron's local ones, or Transformer Engine's. Light.

The index of a checkpoint is read as bytes: its keys are plain text there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from mindspeed.job.world import World

LayerKind = Literal["local", "transformer-engine"]
NAMES: Final[dict[LayerKind, str]] = {"local": "Megatron's local layers", "transformer-engine": "Transformer Engine's layers"}
TRACKER: Final = "latest_checkpointed_iteration.txt"
"""The file in which Megatron-LM names the newest checkpoint of a folder."""
_LAYERS: Final = b"decoder.layers."
_STATES_OF_NORMS: Final = (b"final_layernorm._extra_state", b"final_norm._extra_state")
"""Transformer Engine's norms have an entry of their own; local ones have none."""
_MODELS: Final = {"HybridModel": b"decoder.final_norm.weight", "GPTModel": b"decoder.final_layernorm.weight"}
"""Classes of models by the norm at the end of their decoder."""
_LATENT: Final = b"self_attention.linear_kv_up_proj.weight"
_NORM_OF_LATENT: Final = b"self_attention.kv_layernorm.weight"
_ENGINE_NAMES: Final = {
    True: (b"_up_proj.layer_norm_weight", b"mlp.linear_fc1.layer_norm_weight"),
    False: (b"mlp.router.weight", b"pre_mlp_layernorm.weight"),
}
"""Names that differ from those of local layers: one of them with latent attention, else both together."""


def layers_of(folder: Path) -> LayerKind | None:
    """Return which layers a checkpoint is of; None for one without an index or without transformer layers."""
    index = _index(folder)
    if _LAYERS not in index:
        return None
    return "transformer-engine" if any(state in index for state in _STATES_OF_NORMS) else "local"


def model_of(folder: Path) -> str:
    """Return the class of Megatron's model that a checkpoint is of; empty for one without an index or the end of a decoder."""
    index = _index(folder)
    return next((name for name, norm in _MODELS.items() if norm in index), "")


def unfit_layers(folder: Path, world: World) -> LayerKind | None:
    """Return the layers of a job that cannot load a checkpoint because its names are those of the other layers, or None.

    Local layers load all dense models of Transformer Engine's. For a real Transformer Engine the parameters alone count,
    since the names of its states depend on its version.
    """
    kind = layers_of(folder)
    by_parameters = world.is_set("transformer_engine_layers") and _has_local_parameters(_index(folder))
    if kind == "local" and (world.is_set("engine_over_local") or by_parameters):
        return "transformer-engine"
    is_local = world.known().get("transformer_engine_layers") is False and not world.is_set("engine_over_local")
    if kind == "transformer-engine" and is_local and _renames(_index(folder)):
        return "local"
    return None


def conversion(folder: Path, kind: LayerKind) -> str:
    """Return the command that converts the folder that a job names to load this checkpoint."""
    source = folder
    if (folder.parent / TRACKER).is_file():
        source = folder.parent
    elif folder.parent.name == "checkpoints":
        source = folder.parents[1]
    return f"mindspeed checkpoint convert {source} {source}-{kind} --to {kind}"


def _has_local_parameters(index: bytes) -> bool:
    """Return whether parameters have names that a model of Transformer Engine's layers does not have."""
    if _LATENT in index:
        return _NORM_OF_LATENT in index
    router, norm = _ENGINE_NAMES[False]
    return router in index and norm not in index


def _renames(index: bytes) -> bool:
    """Return whether parameters have other names in a local model."""
    latent = _LATENT in index
    return (any if latent else all)(name in index for name in _ENGINE_NAMES[latent])


def _index(folder: Path) -> bytes:
    try:
        return (folder / ".metadata").read_bytes()
    except OSError:
        return b""
