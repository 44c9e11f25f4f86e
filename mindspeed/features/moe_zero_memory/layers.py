"""Megatron's experts, routed and shared, that compute activations again in backward, and the level of each layer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor

from mindspeed import plugins as ms
from mindspeed.features.moe_zero_memory.counting import counted_layers
from mindspeed.features.moe_zero_memory.forgetting_products import answers, do_first
from mindspeed.job.config import world_of_config
from mindspeed.megatron.module_specs import with_parts
from mindspeed.memory.checkpoint import Checkpoint
from mindspeed.moe.grouped_experts import activation, with_expert_mixin
from mindspeed.moe.overlap import Redispatch
from mindspeed.moe.products import Weight


class Leveled:
    """A module of a layer whose number decides about its level."""

    config: Any
    layer_number: int | None = None

    @functools.cached_property
    def keeps_first(self) -> bool:
        """Return True where this layer has level0."""
        feature = ms.active_feature("moe-zero-memory")
        args, world = feature.args, feature.world
        if args.level == "level0" or self.layer_number is None or args.num_layers is None:
            return bool(args.level == "level0")
        job = ms.World(world.known() | world_of_config(self.config), world.layer_split)
        return not has_level1(self.layer_number, job, args.num_layers)


class ForgettingExperts(Leveled):
    """Stands before `GroupedExperts`."""

    def products(
        self: Any,
        x_RH: Tensor,
        probs: Callable[[], Tensor],
        ends: Tensor,
        weights: tuple[Weight, Weight],
        first: int = 0,
        again: Redispatch | None = None,
    ) -> Tensor:
        """Return the outputs of experts; without a dispatcher that can send their rows again they keep everything."""
        if again is None or self.config.moe_apply_probs_on_input:
            result: Tensor = super().products(x_RH, probs, ends, weights, first, again)  # type: ignore[misc]
            return result
        return answers(x_RH, probs, ends, weights, first, again, partial(activation, self.config), self.keeps_first)

    def before_backward(self, received: Tensor, again: Redispatch) -> Tensor:
        """Make backward send the rows of level1 again as soon as the gradients of the outputs are in flight."""
        return received if self.keeps_first else do_first(received, again.start)


class ForgettingSharedExperts(Leveled):
    """Stands before ``SharedExpertMLP``. With level1 its two products are one checkpoint, whose forward pass has two parts."""

    def linear_fc1_forward_and_act(self: Any, *hidden_by: Any) -> None:
        """Compute the activation, which nothing keeps for backward."""
        self.forgets = not self.keeps_first and torch.is_grad_enabled() and self.cached_fc1_input.requires_grad
        if not self.forgets:
            super().linear_fc1_forward_and_act(*hidden_by)  # type: ignore[misc]
            return
        self.source = self.cached_fc1_input
        with torch.no_grad():
            super().linear_fc1_forward_and_act(*hidden_by)  # type: ignore[misc]

    def linear_fc2_forward(self: Any, *hidden_by: Any) -> None:
        """Compute the output from the activation; backward computes both again from the input."""
        if not self.forgets:
            super().linear_fc2_forward(*hidden_by)  # type: ignore[misc]
            return
        source, self.source = self.source, None
        self.cached_fc2_output = Checkpoint(self.answer, (source,), random=None).run()

    def answer(self: Any, x: Tensor) -> Tensor:
        """Return the outputs for ``x``, from the activation if it exists already."""
        if self.cached_fc2_input is None:
            self.cached_fc1_input = x
            super().linear_fc1_forward_and_act()  # type: ignore[misc]
        super().linear_fc2_forward()  # type: ignore[misc]
        output: Tensor
        output, self.cached_fc2_output = self.cached_fc2_output, None
        return output


def with_forgetting_experts(spec: Any) -> Any:
    """Copy a spec with experts, routed and shared, that keep less for backward."""

    def exchanged(name: str, part: Any) -> Any:
        if isinstance(part, type) and issubclass(part, SharedExpertMLP):
            return type(part.__name__, (ForgettingSharedExperts, part), {"__module__": ForgettingSharedExperts.__module__})
        return part

    return with_parts(with_expert_mixin(spec, ForgettingExperts), exchanged)


def has_level1(number: int, world: ms.World, limit: int) -> bool:
    """Return whether layer ``number``, from 1 on, is among the first ``limit`` of its stage that `counted_layers` has.

    Layers count by their place in their chunk first: the first of every chunk, then the second of every chunk. One of
    multi-token prediction, which has a number of its own, counts as a first one.
    """
    chunks = counted_layers(world)
    at = next((at for at, chunk in enumerate(chunks) if number in chunk), None)
    if at is None:
        return limit > 0
    place, of_stage = chunks[at].index(number), chunks[at % world.pp :: world.pp]
    return sum(min(len(chunk), place + (turn < at // world.pp)) for turn, chunk in enumerate(of_stage)) < limit


def numbering_experts(original: Callable[..., None]) -> Callable[..., None]:
    """Around ``BaseMoELayer.set_layer_number``: its experts and shared experts have the number too."""

    @functools.wraps(original)
    def set_layer_number(layer: Any, layer_number: int) -> None:
        original(layer, layer_number)
        layer.experts.layer_number = layer_number
        if layer.use_shared_expert:
            layer.shared_experts.layer_number = layer_number

    return set_layer_number
