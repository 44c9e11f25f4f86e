"""Attention whose gradients depend on the tensor-parallel size in Megatron, and sparse attention that no layer gets."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
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


@wrapper
def layer_of_sparse_attention(original: Function, config: Any, backend: Any = None) -> Any:
    """Wrap ``get_experimental_attention_variant_module_spec``, which refuses dsa although Megatron has its layer."""
    if config.experimental_attention_variant != "dsa":
        return original(config, backend)
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs

    spec = specs.get_dsa_module_spec_for_backend(config, backend or specs._get_backend_spec_provider(config))
    spec.metainfo.setdefault("fuse_input_layernorm", False)
    return spec


@wrapper
def predictions_of_sparse_attention(original: Function, config: Any, spec: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``get_gpt_mtp_block_spec``: layers of multi-token prediction get the sparse attention of the other layers."""
    if config.experimental_attention_variant != "dsa":
        return original(config, spec, *args, **kwargs)
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs

    layer = spec.layer_specs[-1] if hasattr(spec, "layer_specs") else spec
    attention = specs.get_experimental_attention_variant_module_spec(config)
    return original(config, replace(layer, submodules=replace(layer.submodules, self_attention=attention)), *args, **kwargs)


@wrapper
def losses_of_model_layers(
    original: Function, loss: Tensor, layer_number: int | None, num_layers: int, *args: Any, **kwargs: Any
) -> None:
    """Wrap ``save_loss_to_tracker``: the logged losses have a place for each layer of the model, and none for predictions."""
    if layer_number is None or layer_number <= num_layers:
        original(loss, layer_number, num_layers, *args, **kwargs)


@wrapper
def rotated_without_its_package(original: Function, x: Tensor) -> Tensor:
    """Wrap ``rotate_activation``, which needs the package fast_hadamard_transform, whose kernels need CUDA."""
    from megatron.core.transformer.experimental_attention_variant import dsa

    if dsa.hadamard_transform is not None:
        rotated: Tensor = original(x)
        return rotated
    return hadamard_transform(x, x.size(-1) ** -0.5)


def hadamard_transform(x: Tensor, scale: float) -> Tensor:
    """Multiply the last dimension by the Hadamard matrix of its size and by ``scale``; sums are fp32.

    As the package does, a size that is no power of two gets zeros up to the next one, which are cut off afterwards.
    """
    size = x.size(-1)
    y = F.pad(x.float(), (0, (1 << (size - 1).bit_length()) - size))
    whole, half = y.shape, 1
    while half < whole[-1]:
        first, second = y.view(*whole[:-1], -1, 2, half).unbind(-2)
        y = torch.stack((first + second, first - second), -2).view(whole)
        half *= 2
    return (y[..., :size] * scale).to(x.dtype)
