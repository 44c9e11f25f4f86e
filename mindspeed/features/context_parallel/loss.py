"""Per-token loss scaling: under context parallelism a loss function returns the number of tokens that it summed over.

Megatron divides the sum of gradients by the number of tokens of all ranks. A loss function that returns two values gives
no number: Megatron multiplies its loss by the number of context-parallel ranks, sums the gradients over them, and divides
by nothing. Adam does not see a constant factor, so losses look right.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from megatron.core import parallel_state

from mindspeed.plugins import Advice, Problem, report_problem

_NAME: Final = "context-parallel"


def with_per_token_loss_check(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around ``forward_step_calc_loss``: looks at what the loss function returns."""

    @functools.wraps(original)
    def forward_step_calc_loss(model: Any, output_tensor: Any, loss_func: Any, *args: Any, **kwargs: Any) -> Any:
        return original(model, output_tensor, loss_func and _watched(loss_func), *args, **kwargs)

    return forward_step_calc_loss


def _watched(loss_func: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(loss_func)
    def loss(*args: Any, **kwargs: Any) -> Any:
        returned = loss_func(*args, **kwargs)
        if torch.is_grad_enabled() and isinstance(returned, tuple) and len(returned) == 2 and not kwargs:
            report_problem(_two_values(), log=_first())
        return returned

    return loss


def _first() -> bool:
    """Tell whether this is the first of the ranks that compute a loss."""
    state = parallel_state
    return not state.get_tensor_model_parallel_rank() and not state.get_data_parallel_rank(with_context_parallel=True)


def _two_values() -> Problem:
    ranks = parallel_state.get_context_parallel_world_size()
    text = (
        f"the loss function returns two values, and with {ranks} context-parallel ranks that makes gradients too large by a "
        "constant factor; Adam hides it, the gradient norm shows it"
    )
    fix = "return three: the sum of the losses of this rank's tokens, their number (an int tensor), and the report"
    return Problem("MS343", f"{_NAME}: {text}", (_NAME,), fix=Advice(fix))
