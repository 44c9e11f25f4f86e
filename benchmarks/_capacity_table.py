"""Tokens to the places of experts and back on one rank: by masks, by index, and as Megatron pads to a capacity."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

from benchmarks.table import medians
from mindspeed.features.deepspeed_moe.gating import Routing, admit, choose
from mindspeed.features.deepspeed_moe.settings import mask_bytes
from mindspeed.features.deepspeed_moe.tables import RowOrder, combine_by_masks, dispatch_by_masks
from mindspeed.moe.capacity import capacity_of

TOKENS, EXPERTS, TOPK, HIDDEN = 2048, 16, 2, 512
CAPACITY: Final = capacity_of(TOKENS, EXPERTS, TOPK, 1.0, 4)


def routed() -> tuple[Tensor, Tensor, Routing]:
    """Tokens, logits and their routing, the same at every call."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, HIDDEN, generator=draw).requires_grad_()
    logits = torch.randn(1, TOKENS, EXPERTS, generator=draw).requires_grad_()
    return x, logits, admit(choose(logits, TOPK), CAPACITY)


def by_masks() -> Tensor:
    x, _, routing = routed()
    return combine_by_masks(dispatch_by_masks(x, routing), routing)


def by_index() -> Tensor:
    x, _, routing = routed()
    order = RowOrder.of(routing)
    return order.combine(order.dispatch(x), TOKENS)


def padded() -> Tensor:
    """Megatron's permutation with capacity and padding, its map and probabilities given by the same gate."""
    from megatron.core.transformer.moe.moe_utils import permute, unpermute

    x, _, routing = routed()
    probs = torch.zeros(TOKENS, EXPERTS).scatter(1, routing.expert[0], routing.weight[0])
    kept, places = routing.kept(), CAPACITY * EXPERTS
    rows, _, order = permute(x, kept, num_out_tokens=places, drop_and_pad=True)
    return unpermute(rows, order, x.shape, probs=probs, routing_map=kept, drop_and_pad=True)  # type: ignore[no-any-return]


def shares() -> tuple[float, float]:
    """The time of rows by index, forward and backward, over that of masks and over that of Megatron's padding.

    What all of them do first, the gate, is taken off.
    """

    def both(way: Callable[[], Tensor]) -> Callable[[], None]:
        return lambda: way().sum().backward()

    def gate() -> Tensor:
        return routed()[2].weight

    ways = both(by_masks), both(by_index), both(padded), both(gate)
    masks, index, megatrons, alone = (spent.cpu for spent in medians(*ways, repeat=7))
    return (index - alone) / (masks - alone), (index - alone) / (megatrons - alone)


def saved_less() -> tuple[int, int]:
    """Bytes that masks keep more than rows by index, and the bytes of the masks."""
    return saved(by_masks) - saved(by_index), mask_bytes(TOKENS, EXPERTS, CAPACITY, 4)


def saved(way: Callable[[], Tensor]) -> int:
    """Bytes of storages that autograd keeps."""
    with kept_storages() as storages:
        y = way()
    assert y.requires_grad
    return sum(storages.values())


@contextmanager
def kept_storages() -> Iterator[dict[int, int]]:
    found: dict[int, int] = {}
    alive = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        alive.append(tensor)
        found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found
