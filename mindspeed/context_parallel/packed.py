"""Packed sequences spread over ranks: one row [1, tokens] of them is cut as any other row is, without Transformer Engine.

Documents need no padding of their own and need not end where a rank's tokens do: attention cuts its work at their ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from mindspeed.context_parallel.layout import Layout, zigzag
from mindspeed.megatron.batches import NOT_SLICED
from mindspeed.plugins import MindSpeedError, Problem
from mindspeed.problems import advice


def document_slicer(layout_of: Callable[[int], Layout]) -> Callable[[dict[str, Any], Any], dict[str, Any]]:
    """Make a stand-in for the function of Megatron 0.18 and newer that slices packed rows; ``layout_of`` as below."""

    def get_batch_on_this_cp_rank_per_document(batch: dict[str, Any], cp_group: Any) -> dict[str, Any]:
        return _slice_rows(batch, layout_of(cp_group.size()), cp_group.rank())

    return get_batch_on_this_cp_rank_per_document


def slicer_of_packed(layout_of: Callable[[int], Layout]) -> Callable[..., tuple[dict[str, Any], PackedSeqParams]]:
    """Make a replacement of Megatron's ``get_thd_batch_on_this_cp_rank``; ``layout_of(ranks)`` returns which tokens are
    local.

    It cuts every tensor [1, tokens, ...] of a batch, in place, and raises MS336 where the row is not as many equal pieces.
    """

    def get_thd_batch_on_this_cp_rank(
        batch: dict[str, Any],
        cu_seqlens: Tensor,
        cu_seqlens_padded: Tensor | None,
        max_seqlen: Tensor,
        cp_size: int | None = None,
        cp_rank: int | None = None,
    ) -> tuple[dict[str, Any], PackedSeqParams]:
        ranks = parallel_state.get_context_parallel_world_size() if cp_size is None else cp_size
        rank = parallel_state.get_context_parallel_rank() if cp_rank is None else cp_rank
        longest = int(max_seqlen.flatten()[0])
        starts = {f"cu_seqlens_{side}": cu_seqlens for side in ("q", "kv")}
        padded = {f"cu_seqlens_{side}_padded": cu_seqlens_padded for side in ("q", "kv")}
        share = _slice_rows(batch, layout_of(ranks), rank)
        return share, PackedSeqParams(qkv_format="thd", max_seqlen_q=longest, max_seqlen_kv=longest, **starts, **padded)

    return get_thd_batch_on_this_cp_rank


def rope_function_of_packed(layout_of: Callable[[int], Layout]) -> Callable[..., Tensor]:
    """Make a replacement of Megatron's ``_apply_rotary_pos_emb_thd``: positions restart with each packed sequence.

    ``freqs`` [positions, 1, 1, width] is the table of the longest sequence, or one of the whole row: then nothing begins anew.
    """

    def _apply_rotary_pos_emb_thd(
        t: Tensor,
        cu_seqlens: Tensor,
        freqs: Tensor,
        rotary_interleaved: bool = False,
        mla_rotary_interleaved: bool = False,
        mscale: float = 1.0,
        *,
        cp_group: Any = None,
        max_seqlen: int | None = None,
        multi_latent_attention: bool | None = None,
        **of_megatron_0_20: bool,
    ) -> Tensor:
        group = cp_group or parallel_state.get_context_parallel_group()
        places = torch.arange(t.shape[0] * group.size(), device=t.device)
        starts = cu_seqlens.flatten().to(places.device, places.dtype)
        own = layout_of(group.size()).take(places, group.rank())
        if freqs.shape[0] != len(places):
            # what follows the last sequence is padding, and may be longer than any of them
            own = (own - starts[torch.searchsorted(starts, own, right=True) - 1]).clamp_(max=freqs.shape[0] - 1)
        latent = bool(mla_rotary_interleaved or multi_latent_attention)  # Megatron 0.19 renamed it, not its place
        rotated: Tensor = rope_utils._apply_rotary_pos_emb_bshd(
            t.unsqueeze(1), freqs[own], rotary_interleaved, latent, mscale, **of_megatron_0_20
        )
        return rotated.squeeze(1)

    return _apply_rotary_pos_emb_thd


share_of_packed, rope_of_packed = slicer_of_packed(zigzag), rope_function_of_packed(zigzag)
share_of_documents = document_slicer(zigzag)
"""The functions for tokens in Megatron's zig-zag."""


def _slice_rows(batch: dict[str, Any], layout: Layout, rank: int) -> dict[str, Any]:
    for name, value in batch.items():
        if value is None or name in NOT_SLICED or name == "attention_mask":
            continue
        if (tokens := value.shape[1]) % layout.count:
            text = f"a row of packed sequences has {tokens} tokens, which cannot be split into {layout.count} equal chunks"
            fix = f"pad the row to a multiple of {layout.count} tokens; its documents may have any length"
            raise MindSpeedError([Problem("MS336", text, fix=advice(fix))])
        batch[name] = layout.take(value, rank, 1)
    return batch
