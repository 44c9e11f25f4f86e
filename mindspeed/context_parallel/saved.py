"""Bytes that attention over ranks keeps for backward, in place of those of dense scores. Light."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from mindspeed.context_parallel.costs import Attention, Keep, head_all_to_all
from mindspeed.job.arithmetic import BYTES, shape_of_world
from mindspeed.job.world import World
from mindspeed.plugins.saved_tensors import SavedTensor, SavedTensors, resized

INPUTS: Final = "attention: queries, keys, values"
SOFTMAX: Final = "attention: softmax"
_SCORES: Final = ("attention: softmax dropout", "attention: score buffer")
_MASK: Final = SavedTensor("attention: causal mask", 2048 * 2048, 1, once=True)
"""The mask of all causal blocks, made once in each process."""


def attention_of_micro_batch(world: World) -> Attention:
    """Return the attention of one layer for a micro-batch on a rank. Raises UnknownValue for sizes that are not set."""
    shape = shape_of_world(world)
    tokens = world.seq_length * world.micro_batch_size // world.cp
    heads, size = shape.num_attention_heads // world.tp, BYTES[world.dtype]
    if (latent := shape.latent) is not None:
        return Attention(tokens, heads, heads, latent.head + latent.rope, latent.value, size)
    groups = max(1, shape.num_query_groups // world.tp)
    return Attention(tokens, heads, groups, shape.kv_channels, shape.kv_channels, size)


def given_inputs(a: Attention, world: World) -> int:
    """Return the bytes of queries, keys and values as a layer gives them: values are a view of the product of all three."""
    product = compact_inputs(a)
    if world.is_set("multi_latent_attention"):
        return product
    query, keys = a.tokens * a.heads * a.width * a.element, a.named("half") * a.element
    if world.rotary:
        return product + query + keys
    return product + (query if a.groups < a.heads else 0)


def compact_inputs(a: Attention) -> int:
    """Return the bytes of queries, keys and values without other tensors that they are views of."""
    return (a.tokens * a.heads * a.width + a.block) * a.element


def with_blocks(
    tensors: SavedTensors, a: Attention, inputs: int, received: int = 0, interval: int = 0, is_masked: bool = True
) -> SavedTensors:
    """Return the tensors with ``inputs`` and one number of each row of scores, and no scores.

    Where layers keep ``received`` bytes of other ranks, ``interval`` layers lie between two that do. ``is_masked`` adds the
    mask of causal blocks.
    """
    sizes = {INPUTS: inputs, SOFTMAX: 4 * a.tokens * a.heads} | dict.fromkeys(_SCORES, 0)
    changed: list[SavedTensor] = []
    for tensor in resized(tensors, sizes):
        if tensor.name != INPUTS or not received:
            changed.append(tensor)
            continue
        keeping = tensor.layers // (interval + 1) if received < 0 else -(-tensor.layers // (interval + 1))
        if keeping < tensor.layers:
            changed.append(replace(tensor, layers=tensor.layers - keeping))
        changed.append(replace(tensor, bytes=inputs + received, layers=keeping))
    return (*changed, _MASK) if is_masked else tuple(changed)


def with_heads_exchanged(tensors: SavedTensors, a: Attention, ranks: int, received: int = 0, interval: int = 0) -> SavedTensors:
    """Return the tensors with those of a share of the heads, and its result before it is sent back, over ``ranks``
    neighbours."""
    inside = head_all_to_all(a, ranks)
    result = inside.tokens * inside.heads * inside.value_width * inside.element
    return with_blocks(tensors, inside, compact_inputs(inside) + result, received, interval)


def blocks_of_ring(a: Attention, ranks: int, keep: Keep) -> int:
    """Return the bytes of received blocks that a ring of ``ranks`` keeps."""
    return (ranks - 1) * a.named(keep) * a.element
