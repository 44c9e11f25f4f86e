"""Megatron's own MoE layer with overlapped all-to-alls in steps, one chunk of a micro-batch after another.

T tokens of this rank in a chunk, E experts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mindspeed.moe.chunks import Steps

Route = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Give the probabilities [T, E] of a chunk and its routing map."""


class ChunkedRouting:
    """The router of a layer on the chunks of one micro-batch, whose auxiliary losses are of all chunks together.

    Each chunk is routed as it comes, without losses; the last one again with all before it, where Megatron attaches the losses.
    """

    def __init__(self, router: Any, chunks: int) -> None:
        self._router, self._chunks = router, chunks
        self._logits: list[Tensor] = []

    def route(self, x_SBH: Tensor) -> tuple[Tensor, Tensor]:
        """Give the probabilities of the next chunk and its routing map."""
        router = self._router
        router._maintain_float32_expert_bias()
        self._logits.append(router.gating(router.apply_input_jitter(x_SBH)))
        if len(self._logits) < self._chunks:
            with without_losses(router):
                probs, routing_map = router.routing(self._logits[-1])
                return probs, routing_map
        probs, routing_map = router.routing(torch.cat(self._logits))
        tokens = x_SBH.shape[0] * x_SBH.shape[1]
        return probs[-tokens:], routing_map[-tokens:]


@contextmanager
def without_losses(router: Any) -> Iterator[None]:
    """Have a router attach no losses, and count no tokens for the biases of experts."""
    before = router.training, router.enable_expert_bias
    router.training = router.enable_expert_bias = False
    try:
        yield
    finally:
        router.training, router.enable_expert_bias = before


def overlapped_steps(layer: Any, x_SBH: Tensor, route: Route) -> Steps:
    """Run a layer whose dispatcher posts its transfers, and pause where dispatch and return are under way.

    Dispatcher and shared experts keep the state of a call, so that each chunk has a copy of them around the same weights.
    """
    dispatcher = copy.copy(layer.token_dispatcher)
    if dispatcher.shared_experts is not None:
        dispatcher.shared_experts = copy.copy(dispatcher.shared_experts)
    probs, routing_map = route(x_SBH)
    rows, probs = dispatcher.dispatch_preprocess(x_SBH, routing_map, probs)
    rows, probs = dispatcher.token_dispatch(rows, probs)
    shared = layer.shared_experts(x_SBH) if layer.use_shared_expert and dispatcher.shared_experts is None else None
    yield
    answers, _ = layer.experts(*dispatcher.dispatch_postprocess(rows, probs))
    answers = dispatcher.combine_preprocess(answers)
    yield
    y_SBH: Tensor = dispatcher.combine_postprocess(dispatcher.token_combine(answers))
    return y_SBH if shared is None else y_SBH + shared
