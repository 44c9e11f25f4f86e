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
    "the algorithm applies the causal mask itself; a mask from the data loader would need memory in "
    "the square of the sequence length",
)


def sliced_by(batch: str, table: str, reason: str) -> list[Patch]:
    """Two functions, ``module:name``, in the place of Megatron's that slice a batch and a position table."""
    tables = ("rotary_pos_embedding:RotaryEmbedding", "yarn_rotary_pos_embedding:YarnRotaryEmbedding")
    clears = tuple(f"{_EMBEDDINGS}.{name}.forward" for name in tables)
    return [
        Replace("megatron.core.utils:get_batch_on_this_cp_rank", batch, reason, optional=True),
        Replace(f"{_EMBEDDINGS}.rope_utils:get_pos_emb_on_this_cp_rank", table, reason, optional=True, clears=clears),
    ]


def packed_in(module: str = "mindspeed.context_parallel.packed") -> list[Patch]:
    """``share_of_packed`` and ``rope_of_packed`` of a module, by default those of zig-zag, in the place of Megatron's."""
    reason = (
        "splits packed sequences over context-parallel ranks; Megatron needs Transformer Engine and "
        "padding of each sequence for it"
    )
    turner = f"{_EMBEDDINGS}.rope_utils:_apply_rotary_pos_emb_thd"
    return [
        *(
            Replace(f"megatron.core.utils:{slicer}", f"{module}:{share}", reason, optional=True, when=When(megatron=versions))
            for slicer, share, versions in _PACKED_SLICERS
        ),
        Replace(turner, f"{module}:rope_of_packed", reason, optional=True),
    ]


def any_length() -> Patch:
    """Lets Megatron-LM take a sequence of any length that the algorithm takes."""
    wrapper = "mindspeed.context_parallel.lengths:take_any_length"
    reason = "skips Megatron-LM's check that the sequence divides into two chunks per rank, which only its zig-zag order needs"
    return Wrap("megatron.training.arguments:validate_args", wrapper, reason, phase="setup", optional=True)
