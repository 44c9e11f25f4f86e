"""What an algorithm changes in Megatron whose tokens do not lie in Megatron's zig-zag. Light, data only."""

from __future__ import annotations

from typing import Any, Final

from mindspeed.plugins import Check, Patch, Replace, World, Wrap

_EMBEDDINGS: Final = "megatron.core.models.common.embeddings"


def sliced_by(batch: str, table: str, reason: str) -> list[Patch]:
    """Two functions, ``module:name``, in the place of Megatron's that slice a batch and a position table."""
    tables = ("rotary_pos_embedding:RotaryEmbedding", "yarn_rotary_pos_embedding:YarnRotaryEmbedding")
    clears = tuple(f"{_EMBEDDINGS}.{name}.forward" for name in tables)
    return [
        Replace("megatron.core.utils:get_batch_on_this_cp_rank", batch, reason, optional=True),
        Replace(f"{_EMBEDDINGS}.rope_utils:get_pos_emb_on_this_cp_rank", table, reason, optional=True, clears=clears),
    ]


def any_length() -> Patch:
    """Lets Megatron-LM take a sequence of any length that the algorithm takes."""
    wrapper = "mindspeed.features._shared.context_parallel.lengths:take_any_length"
    reason = "Megatron-LM wants two pieces of the sequence for each rank, which only its zig-zag has"
    return Wrap("megatron.training.arguments:validate_args", wrapper, reason, phase="setup", optional=True)


def _predicts(args: Any, world: World) -> bool:
    return world.cp > 1 and world.knows("mtp_num_layers") and bool(world.mtp_num_layers)


NO_PREDICTION: Final = Check(
    lambda args, world: not _predicts(args, world),
    "multi-token prediction looks for the next tokens where Megatron's zig-zag has them, and here they are elsewhere",
    fix="ring-attention or kv-allgather-cp, or no --mtp-num-layers",
)
"""A model that is not described in the plan is refused when it is built."""
