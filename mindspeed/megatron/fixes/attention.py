"""Attention whose gradients depend on the tensor-parallel size in Megatron."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mindspeed.plugins.patches import Function, wrapper


@wrapper
def key_positions_of_all_heads(get: Function, attention: Any, *args: Any, **kwargs: Any) -> Any:
    """``MLASelfAttention.get_query_key_value_tensors``: the rotary part of a key is shared by the heads of all ranks.

    Megatron sums its gradient over the heads of a rank, and over ranks only where sequence parallelism gathers it.
    """
    query, key, *others = get(attention, *args, **kwargs)
    config = attention.config
    width = config.qk_pos_emb_head_dim
    group = getattr(attention, "tp_group", None) or parallel_state.get_tensor_model_parallel_group()
    is_gathered = config.sequence_parallel and len(attention.linear_kv_down_proj.weight) == config.kv_lora_rank + width
    has_heads = key.size(-2) == attention.num_attention_heads_per_partition
    if group.size() > 1 and key.requires_grad and has_heads and not is_gathered:
        key.register_hook(partial(_of_all_heads, group, width))
    return query, key, *others


def _of_all_heads(group: Any, width: int, gradient: Tensor) -> Tensor:
    """Add the gradients of other ranks' heads for the last ``width`` numbers of a key to those of the first head."""
    own = gradient[..., -width:].sum(-2)
    total = own.clone()
    dist.all_reduce(total, group=group)
    gradient = gradient.clone()
    gradient[..., 0, -width:] += total - own
    return gradient
