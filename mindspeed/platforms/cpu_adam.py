"""Adam by one kernel per step instead of one per term."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from torch import Tensor

from mindspeed.plugins.patches import Function, wrapper


@wrapper
def in_one_kernel(
    update: Function,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    state_steps: Sequence[Tensor],
    foreach: bool | None = None,
    capturable: bool = False,
    differentiable: bool = False,
    fused: bool | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Wrap ``adam`` and ``adamw`` of torch, unless the caller chose an implementation or the kernel lacks the tensors.

    The choice is made at each call and not in the groups of an optimizer, so its ``state_dict`` is that of stock torch.
    """
    tensors = (params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs)
    is_free = fused is None and foreach is None and not (capturable or differentiable)
    if is_free and all(map(_fits, chain(*tensors, state_steps))):
        fused = True
    update(*tensors, state_steps, foreach, capturable, differentiable, fused, *args, **kwargs)


def _fits(tensor: Tensor) -> bool:
    """Return whether the kernel reads a tensor as it is: it takes its elements to lie one after the other, without a check."""
    return tensor.device.type == "cpu" and tensor.is_floating_point() and tensor.is_contiguous()
