"""Patches and overrides of Megatron that algorithms need in addition to their core attention. Light, data only."""

from __future__ import annotations

from typing import Final

from mindspeed.plugins import ArgOverride, Patch, Replace, When, Wrap

_EMBEDDINGS: Final = "megatron.core.models.common.embeddings"

_PACKED_SLICERS: Final = (
    # (function of megatron.core.utils that slices rows of packed sequences, its stand-in, the releases that have it)
    ("get_thd_batch_on_this_cp_rank", "share_of_packed", ">=0.16,<0.18"),
    ("get_sft_batch_on_this_cp_rank", "share_of_documents", ">=0.18,<0.19"),
    ("_get_batch_on_this_cp_rank_per_document_balancing", "share_of_documents", ">=0.19"),
)

NO_DATALOADER_MASK: Final = ArgOverride(
    "create_attention_mask_in_dataloader",
    False,
    "creates no mask in the data loader, which would have seq_length x seq_length elements; attention is causal by itself",
)


def sliced_by(batch: str, table: str, order: str) -> list[Patch]:
    """Two functions, ``module:name``, in the place of Megatron's that slice a batch and a position table.

    ``order`` says which tokens a rank gets.
    """
    tables = ("rotary_pos_embedding:RotaryEmbedding", "yarn_rotary_pos_embedding:YarnRotaryEmbedding")
    clears = tuple(f"{_EMBEDDINGS}.{name}.forward" for name in tables)
    return [
        Replace("megatron.core.utils:get_batch_on_this_cp_rank", batch, f"gives each rank {order}", optional=True),
        Replace(
            f"{_EMBEDDINGS}.rope_utils:get_pos_emb_on_this_cp_rank",
            table,
            f"gives each rank the rotary embeddings of its tokens. Each rank gets {order}",
            optional=True,
            clears=clears,
        ),
    ]


def packed_in(module: str = "mindspeed.context_parallel.packed") -> list[Patch]:
    """``share_of_packed`` and ``rope_of_packed`` of a module, by default those of zig-zag, in the place of Megatron's."""
    split = (
        "splits packed sequences over context-parallel ranks without padding each sequence; "
        "Megatron's function pads them and needs Transformer Engine"
    )
    rotary = (
        "applies rotary embedding to this rank's tokens. This feature splits a whole row of packed sequences over ranks, but "
        "Megatron's function expects that every sequence in the row is split"
    )
    turner = f"{_EMBEDDINGS}.rope_utils:_apply_rotary_pos_emb_thd"
    return [
        *(
            Replace(f"megatron.core.utils:{slicer}", f"{module}:{share}", split, optional=True, when=When(megatron=versions))
            for slicer, share, versions in _PACKED_SLICERS
        ),
        Replace(turner, f"{module}:rope_of_packed", rotary, optional=True),
    ]


def any_length() -> Patch:
    """Lets Megatron-LM take a sequence of any length that the algorithm takes."""
    wrapper = "mindspeed.context_parallel.lengths:take_any_length"
    reason = "skips Megatron-LM's check that the sequence length is a multiple of 2 x cp, which this feature does not need"
    return Wrap("megatron.training.arguments:validate_args", wrapper, reason, phase="setup", optional=True)
