"""Megatron's sparse attention (DSA) over the latent vectors of `layers.with_latent_keys`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.experimental_attention_variant import dsa
from torch import Tensor

from mindspeed.features.mla_split.absorbed import Absorption, Target, divergence, sparse_attention
from mindspeed.plugins.patches import Function, wrapper
from mindspeed.tensor_parallel.weight_gradient import handover


@wrapper
def attention_to_latents(
    original: Function,
    attention: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    x: Tensor,
    qr: Tensor,
    *args: Any,
    packed_seq_params: Any = None,
    **more: Any,
) -> Tensor:
    """Wrap ``DSAttention.forward``: ``key`` has one head of latent vectors, ``value`` is the weight of the up-projection."""
    if value.dim() > 2:
        result: Tensor = original(
            attention, query, key, value, attention_mask, x, qr, *args, packed_seq_params=packed_seq_params, **more
        )
        return result
    config = attention.config
    mask = torch.full((len(key), len(key)), -torch.inf, dtype=torch.float32, device=key.device).triu(1)
    index_scores, selected = attention.indexer.forward_with_scores(
        x.detach(), qr.detach(), mask=mask, packed_seq_params=packed_seq_params
    )
    learns = attention.training and torch.is_grad_enabled()
    target: Target = "none" if not learns else "selected" if config.dsa_indexer_use_sparse_loss else "all"
    absorption = Absorption(
        config.qk_head_dim,
        attention.softmax_scale,
        target,
        handover(value, config.gradient_accumulation_fusion),
    )
    output, probabilities = sparse_attention(query, key.squeeze(-2), value, selected, absorption)
    if probabilities is None:
        return output
    if target == "selected":
        index_scores = index_scores.gather(-1, selected)
    return _learned(attention, output, index_scores, probabilities)


def _learned(attention: Any, output: Tensor, index_scores: Tensor, probabilities: Tensor) -> Tensor:
    """Return the output, whose backward pass begins that of the indexer's loss, and log the loss as Megatron does."""
    config, group = attention.config, attention.indexer.pg_collection.tp
    if group.size() > 1:
        dist.all_reduce(probabilities, group=group)
    coefficient = config.dsa_indexer_loss_coeff or 0.0
    loss = divergence(index_scores, probabilities) * coefficient
    if coefficient > 0:
        dsa.DSAIndexerLossLoggingHelper.save_loss_to_tracker(loss, attention.layer_number, config.num_layers)
    learned: Tensor = dsa.DSAIndexerLossAutoScaler.apply(output, loss)
    return learned
