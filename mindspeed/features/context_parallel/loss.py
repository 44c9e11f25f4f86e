"""The loss of a sequence that several ranks share: a mean over the tokens of all of them, as in one process.

Megatron divides the sum of each rank by that rank's own tokens and averages over ranks. That is another loss where ranks
hold different numbers of tokens that count.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any, Final

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mindspeed import plugins as ms
from mindspeed.plugins.patches import Function, wrapper

_NAME: Final = "context-parallel"


def with_loss_of_all_ranks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around ``forward_step_calc_loss``: the loss function's sum is divided by the tokens of all ranks of the sequence."""
    checked: list[bool] = []

    @functools.wraps(original)
    def forward_step_calc_loss(model: Any, output_tensor: Any, loss_func: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        if loss_func is None or not torch.is_grad_enabled():
            return original(model, output_tensor, loss_func, config, *args, **kwargs)

        @functools.wraps(loss_func)
        def loss(output: Any, **named: Any) -> Any:
            returned = loss_func(output, **named)
            if named or not isinstance(returned, tuple):
                return returned
            if len(returned) == 3 and not config.calculate_per_token_loss:
                return _mean_over_ranks(*returned)
            if len(returned) == 2 and not checked:
                checked.append(True)
                _check_two_values(output, returned[0])
            return returned

        return original(model, output_tensor, loss, config, *args, **kwargs)

    return forward_step_calc_loss


def _mean_over_ranks(total: Tensor, number: Tensor, report: Any) -> tuple[Tensor, Tensor, Any]:
    """Divide the sum by the tokens of a rank on average; Megatron, which averages over ranks, divides by one."""
    tokens = _over_ranks(number.to(total.device)).clamp(min=1)
    return total * (parallel_state.get_context_parallel_world_size() / tokens), torch.ones_like(number), report


def _over_ranks(value: Tensor) -> Tensor:
    whole = value.detach().clone()
    dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())
    return whole


def _check_two_values(losses: Any, loss: Tensor) -> None:
    """Report a loss of two values that is the mean over the tokens of a rank, which Megatron multiplies by the ranks.

    Its gradients by the losses of all tokens then have the number of ranks as their sum, and 1 where it is right.
    Losses are of [samples, sequence]; of other outputs nothing is known.
    """
    ranks = parallel_state.get_context_parallel_world_size()
    if losses.dim() != 2 or not losses.requires_grad or ranks == 1:
        return
    (weights,) = torch.autograd.grad(loss, losses, retain_graph=True)
    if float(_over_ranks(weights.float().sum())) > (1 + ranks) / 2:
        text = (
            "the loss function returns two values and divides by the local tokens of a rank. Gradients are therefore too "
            f"large by a factor of {ranks}, the number of context-parallel ranks (Adam hides this, the gradient norm "
            "shows it)"
        )
        fix = "return three values: the sum of the losses of this rank's tokens, their number (an int tensor), and the report"
        ms.report_problem(ms.Problem("MS343", f"{_NAME}: {text}", (_NAME,), fix=ms.Fix.advise(fix)), log=_first())


def _first() -> bool:
    """Tell whether this is the first of the ranks that compute a loss."""
    state = parallel_state
    return not state.get_tensor_model_parallel_rank() and not state.get_data_parallel_rank(with_context_parallel=True)


@wrapper
def with_router_losses_of_all_ranks(forward_step_calc_loss: Function, *args: Any, **kwargs: Any) -> Any:
    """``forward_step_calc_loss`` before Megatron 0.16, where losses of routers lack the factor that Megatron averages away."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    result = forward_step_calc_loss(*args, **kwargs)
    config = signature(forward_step_calc_loss).bind(*args, **kwargs).arguments["config"]
    if config.num_moe_experts is not None and not config.calculate_per_token_loss:
        scale = MoEAuxLossAutoScaler.main_loss_backward_scale
        MoEAuxLossAutoScaler.set_loss_scale(scale * parallel_state.get_context_parallel_world_size())
    return result


class _Counted:
    """Tokens of this rank over those of all ranks, by which losses of further tokens are weighed; None for equal shares."""

    share: Tensor | None = None


@wrapper
def with_tokens_of_all_ranks(roll_tensor: Function, tensor: Tensor | None, *args: Any, **kwargs: Any) -> Any:
    """``roll_tensor`` with the sum over the sequence in the place of a rank's own: its share of the sum of all ranks."""
    rolled, number = roll_tensor(tensor, *args, **kwargs)
    group = kwargs.get("cp_group")
    if tensor is None or group is None or group.size() == 1:
        return rolled, number
    whole = _over_ranks(number)
    return rolled, whole / group.size() if _Counted.share is None else whole * _Counted.share


@wrapper
def with_shares_of_tokens(process_mtp_loss: Function, *args: Any, **kwargs: Any) -> Any:
    """``process_mtp_loss``: with a loss per token it multiplies by a rank's own tokens, so that these must be in `_Counted`."""
    given = signature(process_mtp_loss).bind(*args, **kwargs).arguments
    mask = given["loss_mask"]
    if mask is None or given["labels"] is None or not given["config"].calculate_per_token_loss:
        return process_mtp_loss(*args, **kwargs)
    number = mask.sum()
    with _counted(number / _over_ranks(number).clamp(min=1)):
        return process_mtp_loss(*args, **kwargs)


@contextmanager
def _counted(share: Tensor) -> Iterator[None]:
    _Counted.share = share
    try:
        yield
    finally:
        _Counted.share = None
