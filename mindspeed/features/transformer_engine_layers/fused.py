"""Functions under the names of Transformer Engine's fused kernels: token permutation, rotary embedding and routing.

T tokens, E experts, R rows: one per token and expert that it goes to, expert after expert. Where Megatron has the same work
unfused, its own function does it, so that a feature which replaces that function is used here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.models.common.embeddings import rope_utils
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.moe import moe_utils
from torch import Tensor

from mindspeed.ops.npu_fused_moe_token_permute import npu_fused_moe_token_permute
from mindspeed.ops.npu_fused_moe_token_unpermute import npu_fused_moe_token_unpermute


def fused_permute(tokens: Tensor, routing_map: Tensor, num_out_tokens: int | None = None) -> tuple[Tensor, Tensor]:
    """Give the rows [R, H] of ``tokens`` [T, H], and [R, 2], the expert and the token of each row.

    ``routing_map`` is [T, E]; ``num_out_tokens`` is R.
    """
    origins = routing_map.t().bool().nonzero()
    rows, _ = npu_fused_moe_token_permute(tokens, origins[:, 1].contiguous(), padded_mode=True)
    return rows, origins


def fused_permute_with_probs(
    tokens: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Give the rows, their probabilities [R] from ``probs`` [T, E], and their experts and tokens."""
    rows, origins = fused_permute(tokens, routing_map)
    return rows, probs[origins[:, 1], origins[:, 0]], origins


def fused_unpermute(
    rows: Tensor, origins: Tensor, merging_probs: Tensor | None = None, restore_shape: Sequence[int] | None = None
) -> Tensor:
    """Sum the rows of each token, weighed by ``merging_probs`` [T, E] if given: [R, H] to ``restore_shape`` (T, H)."""
    expert, token = origins.unbind(1)
    weights = None if merging_probs is None else merging_probs[token, expert]
    shape = tuple(restore_shape or rows.shape)
    return npu_fused_moe_token_unpermute(rows, token.contiguous(), weights, padded_mode=True, restore_shape=shape)


def fused_sort_chunks_by_index(rows: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """Reorder the chunks of rows."""
    output: Tensor = moe_utils.sort_chunks_by_idxs(rows, split_sizes, sorted_index)[0]
    return output


def fused_sort_chunks_by_index_with_probs(
    rows: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    """Reorder the chunks of rows and of their probabilities."""
    output: tuple[Tensor, Tensor] = moe_utils.sort_chunks_by_idxs(rows, split_sizes, sorted_index, probs=probs)
    return output


def fused_topk_with_score_function(**options: Any) -> tuple[Tensor, Tensor]:
    """Give the probabilities and the map of routing, both [T, E]."""
    output: tuple[Tensor, Tensor] = moe_utils.topk_routing_with_score_function(**options)
    return output


def fused_compute_score_for_moe_aux_loss(logits: Tensor, topk: int, score_function: str) -> tuple[Tensor, Tensor]:
    """Give the map and the scores of routing from which an auxiliary loss is made."""
    output: tuple[Tensor, Tensor] = moe_utils.compute_routing_scores_for_aux_loss(logits, topk, score_function)
    return output


def fused_moe_aux_loss(probs: Tensor, tokens_per_expert: Tensor, coeff: float, **counts: Any) -> Tensor:
    """Return the loss that balances experts."""
    options = {"probs": probs, "tokens_per_expert": tokens_per_expert, "moe_aux_loss_coeff": coeff}
    loss: Tensor = moe_utils.switch_load_balancing_loss_func(**options, **counts)
    return loss


def fused_apply_rotary_pos_emb(
    t: Tensor, freqs: Tensor, transpose_output_memory: bool = False, interleaved: bool = False
) -> Tensor:
    """Rotate ``t`` [S, B, N, D] by the angles ``freqs`` [S, 1, 1, D]."""
    output: Tensor = rope_utils._apply_rotary_pos_emb_bshd(t, freqs, rotary_interleaved=interleaved)
    return output


def fused_apply_rotary_pos_emb_thd(t: Tensor, cu_seqlens: Tensor, freqs: Tensor, cp_size: int = 1, cp_rank: int = 0) -> Tensor:
    """Rotate packed sequences ``t`` [T, N, D], each from the first position on."""
    output: Tensor = rope_utils._apply_rotary_pos_emb_thd(t, cu_seqlens, freqs, cp_group=_Ranks(cp_size, cp_rank))
    return output


class _Ranks:
    """Size and rank of a context-parallel group, which Megatron asks for as those of a process group."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self._size

    def rank(self) -> int:
        """Return the rank of this process."""
        return self._rank


def without_kernels(config: Any) -> None:
    """Set options of a configuration to False whose kernels are missing; Megatron's unfused functions compute the same."""
    if config.multi_latent_attention:
        config.apply_rope_fusion = False
    if not layers._grad_accum_fusion_available:
        config.gradient_accumulation_fusion = False
    if config.num_moe_experts and getattr(config, "use_transformer_engine_op_fuser", False):
        config.use_transformer_engine_op_fuser = False
