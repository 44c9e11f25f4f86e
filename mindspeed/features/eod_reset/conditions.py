"""Settings of documents, and the jobs in which attention keeps them apart."""

from __future__ import annotations

from typing import Final

from mindspeed import plugins as ms
from mindspeed.context_parallel.conditions import softmax_is_vanilla
from mindspeed.plugins.shared_conditions import NO_CUDA_GRAPHS


class EodResetArgs(ms.FeatureArgs):
    reset_position_ids: bool = ms.Field(
        True, description="Restart position ids at 0 with every document (true), or count on through the sample (false)"
    )
    fixed_document_length: int | None = ms.Field(
        None,
        ge=1,
        description="If set: split every sample into documents of this number of tokens, instead of at the document ends in "
        "the data. The last document may be shorter",
    )


def _has_length(args: EodResetArgs, world: ms.World) -> bool:
    """Return whether all documents have one length."""
    return args.fixed_document_length is not None


@ms.condition(
    "fixed_document_length={args.fixed_document_length} is greater than seq_length={world.seq_length}",
    fix=(ms.GiveSetting("fixed_document_length", note="at most {world.seq_length}"),),
    when=_has_length,
)
def documents_fit(args: EodResetArgs, world: ms.World) -> bool:
    """Check that a document is not longer than the sequence."""
    return bool((args.fixed_document_length or 0) <= world.seq_length)


def _sees_a_window(args: EodResetArgs, world: ms.World) -> bool:
    """Return whether attention has a sliding window and cp is 1."""
    return bool(world.cp == 1 and world.windowed_attention)


CONDITIONS: Final = (
    documents_fit,
    softmax_is_vanilla,
    NO_CUDA_GRAPHS,  # the ends of documents are read on the host
    ms.Requires(
        "flash-attention",
        reason="with a sliding window, only flash-attention can separate packed documents in attention. Jobs without a sliding "
        "window do not need flash-attention",
        when=_sees_a_window,
    ),
    ms.ModelCondition(
        "mindspeed.features.eod_reset.layers:attention_without_documents",
        "every core attention of the model supports packed documents",
        subject="spec",
    ),
)
