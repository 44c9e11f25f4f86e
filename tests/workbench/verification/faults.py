"""Faults to plant: wrappers of Megatron's functions that each make one mistake. Applied in the workers of the pool."""

import functools
import os
import signal
from typing import Any

from mindspeed.plugins.patches import Function, wrapper

SCALED = "decoder.layers.0.self_attention.linear_qkv.weight"
"""The parameter whose gradient `scaled_gradient` multiplies."""


def scaled_gradient(original: Function) -> Function:
    """Around ``finalize_model_grads``: the gradient of one parameter is 1.001 times too large."""

    return _changing(original, lambda parameter: parameter.main_grad.mul_(1.001))


@wrapper
def skipped(original: Function, *args: Any, **kwargs: Any) -> None:
    """Around a function whose result nobody reads: it does nothing."""


@wrapper
def skipped_at_first(original: Function, group: Any, *args: Any, **kwargs: Any) -> None:
    """Around ``finish_grad_sync``: the reduction of the first step is forgotten."""
    if not group.is_first_batch:
        original(group, *args, **kwargs)


@wrapper
def unreduced(original: Function, input_: Any, group: Any) -> Any:
    """Around ``_reduce(tensor, group)``: every rank keeps its own part of the sum."""
    return input_


@wrapper
def own_part(original: Function, x: Any, group: Any) -> tuple[Any, None]:
    """Around ``_reduce_scatter(tensor, group)``, which gives a part and a handle: the part is not summed over the ranks."""
    return x[group.rank()].clone(), None


@wrapper
def shifted_range(original: Function, size: int, rank: int, world_size: int) -> tuple[int, int]:
    """Around a function that gives (first, end): both are one too large, except on the last rank, which ends in time."""
    first, end = original(size, rank, world_size)
    return (first + 1, end + 1) if rank + 1 < world_size else (first, end)


@wrapper
def rolled(original: Function, *args: Any, **kwargs: Any) -> Any:
    """Around a function that gives a tensor, or one and more: its rows come one place late."""
    result = original(*args, **kwargs)
    if isinstance(result, tuple):
        return (result[0].roll(1, 0), *result[1:])
    return result if result is None else result.roll(1, 0)


@wrapper
def rolled_in_place(original: Function, *args: Any, **kwargs: Any) -> Any:
    """As `rolled`, for a tensor that must stay the same object, as what a pipeline stage receives."""
    result = original(*args, **kwargs)
    for tensor in result if isinstance(result, list) else [result]:
        if tensor is not None:
            tensor.data.copy_(tensor.data.roll(1, 0))
    return result


@wrapper
def misplaced_shards(original: Function, *args: Any, **kwargs: Any) -> list[Any]:
    """Around ``shard_buffer``: each rank's share of a buffer is the one after its own."""
    shards = original(*args, **kwargs)
    return [*shards[1:], shards[0]]


@wrapper
def ungathered(original: Function, group: Any, *args: Any, **kwargs: Any) -> None:
    """Around ``start_param_sync``: the gather of updated weights is never launched, and nobody misses it."""
    group.param_gather_handle = None
    group.param_gather_dispatched = True


@wrapper
def scaled_up(original: Function, *args: Any, **kwargs: Any) -> Any:
    """Around a function that gives a tensor: it is 1.001 times too large."""
    return original(*args, **kwargs) * 1.001


@wrapper
def nothing_changed(original: Function, given: Any, *args: Any, **kwargs: Any) -> Any:
    """Around a function that changes what it is given first: it does not."""
    return given


@wrapper
def plain_swiglu(original: Function, input_: Any, bias: Any, *args: Any) -> Any:
    """Around ``bias_swiglu(input, bias, ...)``: the right numbers, without the operator."""
    import torch.nn.functional as F

    gate, value = (input_ if bias is None else input_ + bias).chunk(2, -1)
    return F.silu(gate) * value


@wrapper
def one_document(original: Function, documents: Any) -> Any:
    """Around a function that gives the ends of documents in each row: they are one document."""
    return tuple((row[-1],) for row in original(documents))


def _has_first_layer(chunk: Any) -> bool:
    from megatron.core.utils import get_attr_wrapped_model

    return bool(get_attr_wrapped_model(chunk, "pre_process"))


def zero_gradient(original: Function) -> Function:
    """Around ``finalize_model_grads``: one gradient is lost."""
    return _changing(original, lambda parameter: parameter.main_grad.zero_())


def nan_gradient(original: Function) -> Function:
    """Around ``finalize_model_grads``: one element of one gradient is not a number."""
    return _changing(original, lambda parameter: parameter.main_grad.view(-1)[:1].fill_(float("nan")))


@wrapper
def error(original: Function, *args: Any, **kwargs: Any) -> Any:
    """Around any function: it raises."""
    raise RuntimeError("a planted error")


@wrapper
def sudden_death(original: Function, *args: Any, **kwargs: Any) -> Any:
    """Around any function: rank 1 kills itself there."""
    import torch.distributed as dist

    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args, **kwargs)


def _changing(original: Function, change: Function) -> Function:
    @functools.wraps(original)
    def finalize_model_grads(model: list[Any], *args: Any, **kwargs: Any) -> Any:
        result = original(model, *args, **kwargs)
        for name, parameter in model[0].named_parameters():
            if name.endswith(SCALED) and _has_first_layer(model[0]):
                change(parameter)
        return result

    return finalize_model_grads
