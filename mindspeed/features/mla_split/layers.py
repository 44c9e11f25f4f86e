"""Megatron's latent attention with the up-projections of `projections`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from megatron.core.transformer import multi_latent_attention as mla
from torch import Tensor

from mindspeed.features.mla_split.projections import HeadWidths, LatentExchange, keys_and_values, of_all_ranks, queries
from mindspeed.plugins.patches import Function, wrapper
from mindspeed.tensor_parallel.linear import WeightGradient, replicated
from mindspeed.tensor_parallel.weight_gradient import weight_gradient

Turn = Callable[[Tensor, Tensor], Tensor]
"""From the rotary parts of queries or keys and their angles to the rotated ones."""


def _replaced(compute: Callable[..., tuple[Tensor, ...]]) -> Any:
    """Return a wrapper of ``MLASelfAttention.get_query_key_value_tensors`` that takes queries, keys and values of ``compute``.

    Without values, the weight of their up-projection is in their place.
    """

    @wrapper
    def get(
        original: Function,
        attention: Any,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: Any = None,
        inference_context: Any = None,
        **more: Any,
    ) -> tuple[Tensor, ...]:
        if inference_context is not None or any(given is not None for given in more.values()):
            given = (key_value_states, position_ids, packed_seq_params, inference_context)
            result: tuple[Tensor, ...] = original(attention, hidden_states, *given, **more)
            return result
        q, kv, positions = _latent_vectors(attention, hidden_states)
        if packed_seq_params is not None:
            q, kv, positions = q.squeeze(1), kv.squeeze(1), positions.squeeze(1)
        if attention.config.q_lora_rank is not None:
            q = attention.q_layernorm(q)
        kv = attention.kv_layernorm(kv)
        angles, turn = _rotary(attention, hidden_states, packed_seq_params)
        project = partial(compute, attention, turn)
        if attention.recompute_up_proj:
            attention.qkv_up_checkpoint = mla.tensor_parallel.CheckpointWithoutOutput()
            query, key, *value = attention.qkv_up_checkpoint.checkpoint(project, q, kv, positions, angles)
        else:
            query, key, *value = project(q, kv, positions, angles)
        return query, key, *(value or [attention.linear_kv_up_proj.weight]), q, kv

    return get


def _widths(attention: Any) -> HeadWidths:
    """Return the heads of this rank and their widths."""
    config = attention.config
    return HeadWidths(
        attention.num_attention_heads_per_partition, config.qk_head_dim, config.qk_pos_emb_head_dim, config.v_head_dim
    )


def _latent_vectors(attention: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the latent vectors of queries and of keys and values, and the rotary part of the keys.

    Under sequence parallelism the first two are those of this rank's tokens. The third is that of all tokens where ranks
    compute a part of its columns each.
    """
    config = attention.config
    if hasattr(attention, "_qkv_down_projection"):  # since Megatron 0.17
        q, kv = attention._qkv_down_projection(hidden_states)
    else:
        q, kv = hidden_states, attention.linear_kv_down_proj(hidden_states)[0]
        if config.q_lora_rank is not None:
            q = attention.linear_q_down_proj(hidden_states)[0]
            if q.size(-1) != config.q_lora_rank:
                q = _own_rows(mla.gather_from_tensor_model_parallel_region(q), config)
    widths = [config.kv_lora_rank, config.qk_pos_emb_head_dim]
    has_all_columns = kv.size(-1) == sum(widths)
    if not has_all_columns:
        kv = mla.gather_from_tensor_model_parallel_region(kv)
    latent, positions = kv.split(widths, dim=-1)
    return q, latent if has_all_columns else _own_rows(latent, config), positions


def _own_rows(x: Tensor, config: Any) -> Tensor:
    """Return the tokens of this rank under sequence parallelism."""
    rows: Tensor = mla.scatter_to_sequence_parallel_region(x) if config.sequence_parallel else x
    return rows


def _rotary(attention: Any, hidden_states: Tensor, packed: Any) -> tuple[Tensor, Turn]:
    """Return the angles of positions, and the function that turns queries and keys by them."""
    config, context = attention.config, attention.pg_collection.cp
    is_packed = packed is not None and packed.qkv_format == "thd"
    length = attention.rotary_pos_emb.get_rotary_seq_len(None, None, hidden_states, config, packed)
    found = attention.rotary_pos_emb(length, packed_seq=is_packed)
    angles, scale = (found, 1.0) if config.rope_type == "rope" else found
    ends = None
    if is_packed:
        ends = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded

    def turn(x: Tensor, angles: Tensor) -> Tensor:
        if packed is None or context.size() == 1:
            angles = angles[: len(x)]
        turned: Tensor = mla.apply_rotary_pos_emb(
            x, angles, config=config, cu_seqlens=ends, mscale=scale, cp_group=context, **_interleaved()
        )
        return turned

    return angles, turn


@cache
def _interleaved() -> dict[str, bool]:
    """Return the argument that Megatron's function of rotary positions has since 0.19, instead of a configured value."""
    name = "mla_rotary_interleaved"
    return {name: True} if name in inspect.signature(mla.apply_rotary_pos_emb).parameters else {}


def _projected(
    attention: Any, turn: Turn, q: Tensor, kv: Tensor, positions: Tensor, angles: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values; the gather of the queries' latent vectors overlaps with the product of the others."""
    of_keys, widths = attention.linear_kv_up_proj, _widths(attention)

    def compute(x: Tensor, rotated: Tensor, exchange: LatentExchange, gradient: WeightGradient) -> tuple[Tensor, Tensor]:
        return keys_and_values(x, rotated, of_keys.weight, widths, exchange, gradient)

    query, (key, value) = _computed(attention, turn, compute, q, kv, positions, angles)
    return query, key, value


def _unprojected(attention: Any, turn: Turn, q: Tensor, kv: Tensor, positions: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries, and the latent vectors with their rotated parts as keys of one head."""

    def compute(x: Tensor, rotated: Tensor, exchange: LatentExchange, gradient: WeightGradient) -> Tensor:
        return torch.cat([of_all_ranks(x, exchange).unsqueeze(-2), rotated], dim=-1)

    query, key = _computed(attention, turn, compute, q, kv, positions, angles)
    return query, key


with_products_in_place = _replaced(_projected)
with_latent_keys = _replaced(_unprojected)


def _computed(
    attention: Any, turn: Turn, compute: Callable[..., Any], q: Tensor, kv: Tensor, positions: Tensor, angles: Tensor
) -> tuple[Tensor, Any]:
    """Return queries, and what ``compute`` makes of the latent vectors and the rotated parts of keys."""
    config, group = attention.config, attention.tp_group
    of_queries = attention.linear_q_proj if config.q_lora_rank is None else attention.linear_q_up_proj
    of_keys = attention.linear_kv_up_proj
    has_rows = config.sequence_parallel and group.size() > 1
    widths = _widths(attention)
    kv_exchange = _posted(of_keys, kv)
    is_gathered = not has_rows or len(positions) != len(kv)
    positions_exchange = None if is_gathered else LatentExchange(group, positions, sequence_parallel=True)
    q_exchange = _posted(of_queries, q)
    if positions_exchange is not None:
        positions = of_all_ranks(positions, positions_exchange)
    elif group.size() > 1:
        positions = replicated(positions, group)
    turned = turn(positions.unsqueeze(-2), angles)

    def compute_keys(x: Tensor, exchange: LatentExchange, gradient: WeightGradient) -> Any:
        return compute(x, turned, exchange, gradient)

    def compute_queries(x: Tensor, exchange: LatentExchange, gradient: WeightGradient) -> Tensor:
        return queries(x, of_queries.weight, exchange, gradient)

    made = _called(of_keys, compute_keys, kv, kv_exchange)
    query = _called(of_queries, compute_queries, q, q_exchange)
    query = query.view(*query.shape[:-1], widths.heads, widths.key + widths.rope)
    query[..., widths.key :] = turn(query[..., widths.key :], angles)
    return query, made


def _posted(linear: Any, x: Tensor) -> LatentExchange | None:
    """Post the gather of a layer's input; None where the layer has a norm, whose weights its hooks may wait for."""
    return None if hasattr(linear, "normalized") else LatentExchange(linear.tp_group, x, linear.sequence_parallel)


def _called(linear: Any, compute: Callable[..., Any], x: Tensor, posted: LatentExchange | None) -> Any:
    """Call a layer with the product ``compute``. Its hooks run: they wait for gathered weights, or offload inputs."""

    def forward(x: Tensor) -> Any:
        x = linear.normalized(x) if posted is None else x
        exchange = posted or LatentExchange(linear.tp_group, x, linear.sequence_parallel)
        return compute(x, exchange, weight_gradient(linear.weight, linear.gradient_accumulation_fusion))

    before = linear.__dict__.get("forward")
    linear.forward = forward
    try:
        return linear(x)
    finally:
        del linear.forward
        if before is not None:
            linear.forward = before
