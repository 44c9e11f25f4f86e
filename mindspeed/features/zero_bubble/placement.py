"""What stages placed as a V need. Light."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from packaging.specifiers import SpecifierSet

from mindspeed.pipeline.conditions import TIED, UNTIE
from mindspeed.plugins import GiveField, GiveSetting, World, condition

_LOOP: Final = GiveSetting("placement", "loop")
_BY_CHUNK: Final = SpecifierSet(">=0.14,<0.19")
"""Releases of Megatron that ask for stages where the wraps of a V answer: by chunk, and no loss by stage."""
_UNEVEN: Final = {
    "pipeline_layout": "deals layers out by a layout",
    "first_stage_layers": "gives the first stage {} layers",
    "last_stage_layers": "gives the last stage {} layers",
    "embedding_is_layer": "counts the embedding as a layer",
    "loss_is_layer": "counts the output layer as a layer",
}


def _is_v(args: Any, world: World) -> bool:
    """Return whether stages are placed as a V."""
    return bool(args.placement == "v")


def _uneven(args: Any, world: World) -> Mapping[str, str]:
    """Return what makes stages unequal."""
    if world.layer_split:
        return {"uneven": f"has model chunks of {', '.join(map(str, world.layer_split))} layers"}
    texts = [text.format(getattr(world, field)) for field, text in _UNEVEN.items() if world.is_set(field)]
    return {"uneven": " and ".join(texts)}


@condition("placement v needs equal stages, but the job {uneven}", fix=(_LOOP,), when=_is_v, values=_uneven)
def stages_are_equal(args: Any, world: World) -> bool:
    """Check that stages have equal numbers of layers."""
    return not world.layer_split and not any(world.is_set(field) for field in _UNEVEN)


@condition(
    "placement v needs two model chunks on each rank, but vpp is {world.vpp}", fix=(GiveField("vpp", 2), _LOOP), when=_is_v
)
def ranks_have_two_chunks(args: Any, world: World) -> bool:
    """Check that each rank has two model chunks."""
    return bool(world.vpp == 2)


@condition(TIED, fix=(UNTIE, _LOOP), when=_is_v)
def embeddings_are_untied(args: Any, world: World) -> bool:
    """Check that the embedding and the output layer have separate weights."""
    return not world.tied_embeddings


@condition(
    "placement v has no stage for the {world.mtp_num_layers} layers of multi-token prediction",
    fix=(GiveField("mtp_num_layers", 0), _LOOP),
    when=_is_v,
)
def has_no_token_prediction(args: Any, world: World) -> bool:
    """Check that there is no multi-token prediction, which needs the embedding and the output layer on two ranks."""
    return bool(world.mtp_num_layers == 0)


@condition("placement v supports Megatron 0.14 to 0.18, and this is {world.megatron}", fix=(_LOOP,), when=_is_v)
def megatron_asks_by_chunk(args: Any, world: World) -> bool:
    """Check that this release of Megatron finds the stages of a V."""
    return _BY_CHUNK.contains(world.megatron, prereleases=True)


V_CONDITIONS: Final = (
    ranks_have_two_chunks,
    embeddings_are_untied,
    has_no_token_prediction,
    stages_are_equal,
    megatron_asks_by_chunk,
)
