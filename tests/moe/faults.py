"""Faults to plant in a layer with experts, as contexts: each must be seen in its results or in its schedule."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor

from mindspeed.moe import grouped_experts
from mindspeed.moe.allgather import AllGatherCall
from mindspeed.moe.alltoall import AllToAllCall
from mindspeed.ops.process_groups import PendingCollective

Function = Callable[..., Any]


@contextmanager
def without_wait(number: int) -> Iterator[list[PendingCollective]]:
    """Leave out the wait ``number`` of those that end a transfer; gives the transfers that were waited for."""
    original, ended = PendingCollective.wait, []

    def wait(pending: PendingCollective) -> Tensor:
        if pending._works:
            ended.append(pending)
            if len(ended) == number + 1:
                pending._works, pending._sent = (), None
        return original(pending)

    with patch.object(PendingCollective, "wait", wait):
        yield ended


@contextmanager
def weak_weight_gradient() -> Iterator[None]:
    """Compute 0.999 of the gradient of every weight of experts."""
    original = grouped_experts.weight_gradient
    with patch.object(grouped_experts, "weight_gradient", lambda *args: original(*args) * 0.999):
        yield


@contextmanager
def weak_probability_gradient() -> Iterator[None]:
    """Pass on 0.999 of the gradient of every probability."""
    with ExitStack() as stack:
        for call in (AllToAllCall, AllGatherCall):
            original = call.permute_probabilities

            def weak(self: Any, probs: Tensor, original: Function = original) -> Tensor:
                exact = original(self, probs)
                return exact.detach() * 0.001 + exact * 0.999  # type: ignore[no-any-return]

            stack.enter_context(patch.object(call, "permute_probabilities", weak))
        yield


@contextmanager
def shifted_split() -> Iterator[None]:
    """Give the rows of every expert to the next one."""
    alltoall = AllToAllCall.expert_counts
    gathered = AllGatherCall.counts.func
    with ExitStack() as stack:
        stack.enter_context(patch.object(AllToAllCall, "expert_counts", lambda self, part: alltoall(self, part).roll(1)))
        stack.enter_context(patch.object(AllGatherCall, "counts", property(lambda self: gathered(self).roll(1))))
        yield


FAULTS = {f.__name__: f for f in (weak_weight_gradient, weak_probability_gradient, shifted_split)}
