"""The layers of a plain module that are recomputed, so that activations fit a budget."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mindspeed.memory.choice import Option, choose
from mindspeed.ops.errors import refuse


@dataclass(slots=True)
class _Layer:
    """Hold the bytes that a layer keeps for backward, those of its inputs, and the seconds of its forward pass."""

    kept: int = 0
    inputs: int = 0
    seconds: float = math.inf


@dataclass(frozen=True, slots=True)
class RecomputePlan:
    """The layers to recompute, and what that gives: bytes of activations at the peak, seconds of recomputation in a step."""

    recomputed: frozenset[nn.Module] = field(repr=False)
    bytes: int
    seconds: float


class RecomputePlanner:
    """Chooses which of ``layers``, called one after the other, are recomputed to fit a budget in the least time.

    Measure a forward pass of a typical micro-batch, choose, and let torch recompute the layers:

    >>> planner = RecomputePlanner(model.layers)
    >>> with planner.measured():
    ...     model(tokens)
    >>> plan = planner.plan(budget=8 * 2**30)
    >>> apply_activation_checkpointing(model, check_fn=plan.recomputed.__contains__)

    The last function is that of ``torch.distributed.algorithms._checkpoint.checkpoint_wrapper``. The choice is the optimum of
    the knapsack problem for up to 16 layers, and at most 1 % slower for more.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = {layer: _Layer() for layer in layers}

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the forward passes inside: of each layer the most bytes and the least time of all its calls."""
        handles = [handle for layer, found in self._layers.items() for handle in _measure(layer, found)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def plan(self, budget: int) -> RecomputePlan:
        """Return the choice for ``budget`` bytes of activations of all layers, one micro-batch of them.

        Raises OperatorError where nothing was measured, and for a budget below what recomputation of every layer needs.
        """
        layers = list(self._layers.values())
        if not all(layer.kept for layer in layers):
            refuse("RecomputePlanner: nothing was measured", "run a forward pass with gradients in planner.measured()")
        stays, least = [True] * len(layers), _peak(layers, [False] * len(layers))
        if least > budget:
            refuse(
                f"RecomputePlanner: the budget is {budget} bytes, but {least} are needed even if every layer is recomputed",
                f"give {least} bytes or more, or use a smaller micro-batch",
            )
        if _peak(layers, stays) > budget:
            groups = [(Option("keep", one.kept, 0.0), Option("recompute", one.inputs, one.seconds)) for one in layers]
            whole = max(one.kept for one in layers)  # backward holds all tensors of the layer that it has reached
            chosen = choose(groups, budget - whole) or [1] * len(layers)
            stays = [option == 0 for option in chosen]
        left = [layer for layer, kept in zip(self._layers, stays, strict=True) if not kept]
        return RecomputePlan(frozenset(left), _peak(layers, stays), sum(self._layers[layer].seconds for layer in left))


def _peak(layers: Sequence[_Layer], stays: Sequence[bool]) -> int:
    """Return the most bytes while backward goes from the last layer to the first, each whole when it is reached."""
    held = [one.kept if kept else one.inputs for one, kept in zip(layers, stays, strict=True)]
    before = [0, *accumulate(held)]
    return max(rest + one.kept for rest, one in zip(before[:-1], layers, strict=True))


def _measure(layer: nn.Module, found: _Layer) -> Iterator[Any]:
    """Yield the handles of hooks that measure each call of a layer."""
    calls: list[tuple[dict[int, int], int, Any, float]] = []

    def entered(layer: nn.Module, args: Any, kwargs: Any) -> None:
        held = {tensor.untyped_storage()._cdata for tensor in (*layer.parameters(), *layer.buffers())}
        saved: dict[int, int] = {}
        inputs = {
            leaf.untyped_storage()._cdata: leaf.untyped_storage().nbytes()
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor)
        }

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in held:
                saved[storage._cdata] = storage.nbytes()
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, _unchanged)
        hooks.__enter__()
        calls.append((saved, sum(inputs.values()), hooks, _now()))

    def left(layer: nn.Module, args: Any, output: Any) -> None:
        saved, inputs, hooks, begin = calls.pop()
        hooks.__exit__()
        found.seconds = min(found.seconds, _now() - begin)
        found.kept = max(found.kept, sum(saved.values()))
        found.inputs = max(found.inputs, inputs)

    yield layer.register_forward_pre_hook(entered, with_kwargs=True)
    yield layer.register_forward_hook(left, always_call=True)


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _now() -> float:
    """Return the seconds of a clock, when the device has done what it was given."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()
