"""Bytes that attention over ranks sends for one layer, the costs by which an algorithm is chosen, and those that it keeps.

With ``t`` tokens on a rank, ``P`` ranks, and the key heads being a share r of the query heads, a ring sends r P / (1 + r)
times what Ulysses does, so it is the cheaper one for few key heads and few ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Final, Literal

from mindspeed.job.arithmetic import BYTES, shape_of_world
from mindspeed.plugins import Cost, World
from mindspeed.plugins.saved_tensors import SavedTensor, SavedTensors, resized

WIDE: Final = 4
"""Bytes of a gradient of keys and values while it is summed over ranks."""
Keep = Literal["none", "half", "full"]
"""A policy for backward: it is about nothing, keys, or keys and values."""
STATISTIC: Final = 4
"""Bytes of the logarithm of a row's denominator."""


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention of one layer on one rank: ``tokens`` here times batch, and bytes of an element."""

    tokens: int
    heads: int
    groups: int
    width: int
    value_width: int
    element: int

    @property
    def block(self) -> int:
        """Numbers in this rank's keys and values."""
        return self.tokens * self.groups * (self.width + self.value_width)

    def named(self, keep: Keep) -> int:
        """Numbers in those that a policy is about."""
        return {"none": 0, "half": self.tokens * self.groups * self.width, "full": self.block}[keep]

    @property
    def own(self) -> int:
        """Bytes of query, key, value and result, and of one number for each row of the softmax."""
        result = self.tokens * self.heads * (self.width + self.value_width)
        return (result + self.block) * self.element + self.tokens * self.heads * STATISTIC


@dataclass(frozen=True, slots=True)
class SentBytes:
    """Sent by one rank in forward and in backward."""

    forward: int
    backward: int

    @property
    def both(self) -> int:
        return self.forward + self.backward

    def __add__(self, other: SentBytes) -> SentBytes:
        return SentBytes(self.forward + other.forward, self.backward + other.backward)


NOTHING: Final = SentBytes(0, 0)


def copies(heads: int, groups: int, ranks: int) -> int:
    """Count the ranks that each of ``groups`` key heads is sent to, so that every rank gets those that its query heads use."""
    least = ranks // gcd(groups, ranks)
    return least if heads // groups % least == 0 else heads // groups


def ring(a: Attention, ranks: int, keep: Keep = "none", narrow_gradients: bool = False) -> SentBytes:
    """Keys and values go round once in each direction of time, but for what is kept, their gradients once."""
    forward = (ranks - 1) * a.block * a.element
    again = forward - (ranks - 1) * a.named(keep) * a.element
    return SentBytes(forward, again + (ranks - 1) * a.block * (a.element if narrow_gradients else WIDE))


def ulysses(a: Attention, ranks: int, keep: Keep = "none") -> SentBytes:
    """Query, key, value and result are exchanged once forward, their gradients once backward, and what is kept as it was again.

    Where one key head is gathered as much is sent.
    """
    times = copies(a.heads, a.groups, ranks)
    numbers = (a.tokens * a.heads * (a.width + a.value_width), times * a.block, times * a.named(keep))
    query, keys, again = (number * a.element * (ranks - 1) // ranks for number in numbers)
    return SentBytes(query + keys, query + keys + again)


def hybrid(a: Attention, inner: int, outer: int) -> SentBytes:
    """Ulysses over ``inner`` ranks around a ring of ``outer``, whose ranks have more tokens of fewer heads."""
    return ulysses(a, inner) + ring(head_all_to_all(a, inner), outer)


def head_all_to_all(a: Attention, ranks: int) -> Attention:
    """The bytes of a rank after the head all-to-all of ``ranks`` neighbours."""
    keys = a.groups * copies(a.heads, a.groups, ranks) // ranks
    return Attention(a.tokens * ranks, a.heads // ranks, keys, a.width, a.value_width, a.element)


def gathered(a: Attention, ranks: int) -> SentBytes:
    """Keys and values are gathered in forward and again in backward; gradients are scattered to their owners."""
    forward = (ranks - 1) * a.block * a.element
    return SentBytes(forward, forward + (ranks - 1) * a.block * WIDE)


ACROSS: Final = 9
"""A byte between nodes for which attention waits counts as so many inside a node: 450 GB/s against 50 GB/s for each rank."""


def attention_of(world: World) -> Attention:
    """Make the attention of a layer on a rank, for one sequence. Raises UnknownValue for all that the world does not say."""
    world.need("num_attention_heads", "num_query_groups", "hidden_size", "seq_length", "dtype")
    width = world.hidden_size // world.num_attention_heads
    heads, groups = (max(1, n // world.tp) for n in (world.num_attention_heads, world.num_query_groups))
    return Attention(world.seq_length // world.cp, heads, groups, width, width, 4 if world.dtype == "fp32" else 2)


def near(world: World) -> int:
    """Count the context-parallel ranks of a node; all of them where the size of a node is not known."""
    return gcd(max(1, world.ranks_per_node // world.tp), world.cp) if world.knows("ranks_per_node") else int(world.cp)


def cost(hidden: SentBytes, waiting: SentBytes, across: int, **settings: Any) -> Cost:
    """Return bytes as a `Cost`: of those in ``waiting``, ``across`` go from node to node.

    What a computation hides counts once, wherever it goes; where two send as much, the one that waits for less is better.
    """
    total = hidden.both + waiting.both
    text = f"a rank sends {total:,} bytes per layer and sequence, forward and backward"
    if across:
        text += f", {across:,} of them between nodes and not overlapped with compute"
    return Cost((total + (ACROSS - 1) * across, waiting.both), text, settings)


def cost_of_waiting(sent: SentBytes, world: World) -> Cost:
    """Return the cost of messages to all other ranks, for which attention waits."""
    return cost(NOTHING, sent, between(sent, world.cp, near(world)))


def between(sent: SentBytes, ranks: int, near: int) -> int:
    """Return the share of equal messages to all other ranks that crosses nodes."""
    return sent.both * (ranks - near) // (ranks - 1) if ranks > 1 else 0


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
