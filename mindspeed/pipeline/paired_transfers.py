"""Megatron's all-to-alls, during which another pass computes, and its layers, which that pass may be inside of as well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch.distributed as dist
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

from mindspeed.moe.transfer import all_to_all, post, wait
from mindspeed.plugins.patches import Function, wrapper
from mindspeed.process.place import PLACE


@wrapper
def in_turns_with_another_pass(
    original: Function,
    group: dist.ProcessGroup,
    input_: Tensor,
    output_split_sizes_: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    *more: Any,
    **others: Any,
) -> Tensor:
    """Wrap ``all_to_all``: the transfer and that of its gradient are posted, and waited for when the other pass hands over."""
    if group.size() == 1:
        result: Tensor = original(group, input_, output_split_sizes_, input_split_sizes, *more, **others)
        return result
    transfer = all_to_all(group, input_split_sizes, output_split_sizes_)
    return wait(post(input_, transfer), transfer)


class _LayerStates:
    """Hold what the modules of the MoE layer that a pass is inside of keep between the steps of its forward pass."""

    def __init__(self) -> None:
        self.inside: list[Any] = []

    def get(self) -> list[tuple[Any, dict[str, Any]]]:
        """Read what the modules keep."""
        return [(module, vars(module).copy()) for module in self.inside]

    def set(self, kept: list[tuple[Any, dict[str, Any]]]) -> None:
        """Write it."""
        self.inside = [module for module, _ in kept]
        for module, state in kept:
            vars(module).clear()
            vars(module).update(state)


LAYER_STATES: Final = _LayerStates()


class _TrackerName:
    """Hold the name of the random state that Megatron's tracker uses: a pass may hand over while it uses one."""

    def get(self) -> Any:
        """Read it."""
        return vars(get_cuda_rng_tracker()).get("_current_state_name")

    def set(self, name: Any) -> None:
        """Write it."""
        if name is not None:
            get_cuda_rng_tracker()._current_state_name = name


TRACKER_NAME: Final = _TrackerName()


@wrapper
def with_states_of_its_own(original: Function, layer: Any, *args: Any, **more: Any) -> Any:
    """Wrap ``MoELayer.forward``: while it runs, what the layer, its dispatcher and its experts keep belongs to this pass."""
    before = LAYER_STATES.inside
    PLACE.enter(f"layer {layer.layer_number}")
    modules = (layer, layer.token_dispatcher, layer.experts, layer.shared_experts)
    LAYER_STATES.inside = [*before, *(module for module in modules if module is not None)]
    try:
        return original(layer, *args, **more)
    finally:
        LAYER_STATES.inside = before
