"""Stand-ins for Megatron's permute and unpermute, with their signatures.

T tokens, E experts, K experts per token at most, R rows: one per token and expert that it goes to, expert after expert.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed import plugins as ms
from mindspeed.moe.routing import RowIndex, expert_indices, positions_of, probabilities_of
from mindspeed.ops.npu_fused_moe_token_permute import npu_fused_moe_token_permute
from mindspeed.ops.npu_fused_moe_token_unpermute import npu_fused_moe_token_unpermute


def permute(
    tokens: Tensor,
    routing_map: Tensor,
    probs: Tensor | None = None,
    num_out_tokens: int | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Give the rows [R, H] of ``tokens`` [T, H], their probabilities [R], and what `unpermute` needs to go back.

    ``routing_map`` and ``probs`` are [T, E]. The third result is [T, K], the row of each token and choice, indices from R on
    being none, K the most experts that a token goes to. With ``drop_and_pad`` every expert has ``num_out_tokens / E`` rows,
    those that no token was sent to being filled with any tokens, and the third result is [R], the token of each row.
    The device is read only where ``num_out_tokens`` is not given.
    """
    if drop_and_pad and num_out_tokens is not None:
        token_EC = _capacity_first(routing_map, int(num_out_tokens) // routing_map.shape[1])
        rows, _ = npu_fused_moe_token_permute(tokens, token_EC, padded_mode=True)
        return rows, None if probs is None else _of_rows(probs, token_EC), token_EC.flatten()
    routing_map = routing_map.bool()
    count = int(routing_map.sum() if num_out_tokens is None else num_out_tokens)
    index = RowIndex(routing_map, positions_of(routing_map, count), None)
    rows, slot_TK = _by_slots(tokens, index, _most_experts(routing_map, count))
    return rows, None if probs is None else probabilities_of(probs, index.positions), slot_TK


def unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: Sequence[int],
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
    pad_offsets: Tensor | None = None,
) -> Tensor:
    """Sum the rows of each token, weighed by ``probs`` [T, E] if given: [R, H] to ``restore_shape`` (T, H).

    ``sorted_indices`` is the third result of `permute`; ``probs`` need the same ``routing_map``. Rows are never padded for
    quantization, so that ``pad_offsets`` say nothing.
    """
    weights = None
    if sorted_indices.dim() == 2:
        if probs is not None and routing_map is not None:
            weights = _of_choices(probs, routing_map.bool(), sorted_indices.shape[1])
        return npu_fused_moe_token_unpermute(
            permuted_tokens, sorted_indices.flatten(), weights, restore_shape=tuple(restore_shape)
        )
    if probs is not None and routing_map is not None:
        weights = _of_rows(probs, sorted_indices.view(routing_map.shape[1], -1))
    return npu_fused_moe_token_unpermute(
        permuted_tokens, sorted_indices, weights, padded_mode=True, restore_shape=tuple(restore_shape)
    )


def take_rows(x_TH: Tensor, index: RowIndex) -> Tensor:
    """The rows [R, H] of tokens in the place of `mindspeed.moe.routing.take_rows`; their gradients are summed in fp32."""
    if index.topk is None:
        return npu_fused_moe_token_permute(x_TH, index.token_R, padded_mode=True)[0]
    rows, index.slot_TK = _by_slots(x_TH, index, index.topk)
    return rows


def sum_rows(rows_RH: Tensor, index: RowIndex) -> Tensor:
    """Sum the rows of each token, [T, H], in fp32, in the place of `mindspeed.moe.routing.sum_rows`."""
    shape = (index.tokens, rows_RH.shape[1])
    if index.slot_TK is None:
        return npu_fused_moe_token_unpermute(rows_RH, index.token_R, padded_mode=True, restore_shape=shape)
    return npu_fused_moe_token_unpermute(rows_RH, index.slot_TK.flatten(), restore_shape=shape)


def _by_slots(x_TH: Tensor, index: RowIndex, topk: int) -> tuple[Tensor, Tensor]:
    """The rows [R, H] of tokens, and the rows [T, K] of each token."""
    expert_TK = index.expert_TK(topk)
    rows, slots = npu_fused_moe_token_permute(x_TH, expert_TK, len(index.positions) - expert_TK.numel())
    return rows, slots.view_as(expert_TK)


def _most_experts(routing_map: Tensor, rows: int) -> int:
    """The most experts that a token goes to: those that routers choose, unless padding for quantization adds some."""
    tokens, experts = routing_map.shape
    topk = getattr(ms.active_feature("moe-token-permute"), "topk", 0)
    return min(topk, experts) if topk and rows <= tokens * topk else experts


def _of_choices(probs: Tensor, routing_map: Tensor, topk: int) -> Tensor:
    """The probabilities [T, K] of the experts of each token, 0 where it has fewer."""
    expert_TK = expert_indices(routing_map, topk)
    return probs.gather(1, expert_TK.clamp(min=0)) * (expert_TK >= 0)


def _capacity_first(routing_map: Tensor, capacity: int) -> Tensor:
    """Choose for each expert the first ``capacity`` tokens that are sent to it, then others: [E, capacity]."""
    order_ET = routing_map.t().to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return order_ET[:, :capacity].contiguous()


def _of_rows(probs: Tensor, token_EC: Tensor) -> Tensor:
    return probs.t().gather(1, token_EC).flatten()


def with_operator(original: Callable[..., Any]) -> Callable[..., Any]:
    """Put `permute` in the place of Megatron's, which since 0.17 also returns padding offsets and the rows of each expert.

    The map that batch-invariant sums of Megatron 0.20 need is only in Megatron's own result.
    """
    if "tokens_per_expert" not in inspect.signature(original).parameters:
        return permute

    @functools.wraps(original)
    def permute_unpadded(
        *args: Any,
        tokens_per_expert: Any = None,
        align_size: int = 0,
        return_batch_invariant_inverse_map: bool = False,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        if return_batch_invariant_inverse_map:
            answer: tuple[Any, ...] = original(*args, return_batch_invariant_inverse_map=True, **kwargs)
            return answer
        return (*permute(*args, **kwargs), None, tokens_per_expert)

    return permute_unpadded


def with_sums(original: Callable[..., Any]) -> Callable[..., Any]:
    """Put `unpermute` in the place of Megatron's, which since 0.20 also sums by a map of batch-invariant rows."""
    if "batch_invariant_inverse_map" not in inspect.signature(original).parameters:
        return unpermute

    @functools.wraps(original)
    def unpermute_rows(*args: Any, batch_invariant_inverse_map: Tensor | None = None, **kwargs: Any) -> Any:
        if batch_invariant_inverse_map is not None:
            return original(*args, batch_invariant_inverse_map=batch_invariant_inverse_map, **kwargs)
        return unpermute(*args, **kwargs)

    return unpermute_rows


def without_transformer_engine(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around ``sort_chunks_by_idxs``: a fused version would copy chunks as often, so Megatron's own code does it."""

    @functools.wraps(original)
    def sort_chunks(input: Any, split_sizes: Any, sorted_idxs: Any, probs: Any = None, fused: bool = False) -> Any:
        return original(input, split_sizes, sorted_idxs, probs=probs, fused=False)

    return sort_chunks
