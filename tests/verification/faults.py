"""Faults to plant: wrappers of Megatron's functions that each make one mistake. Applied in the workers of the pool."""

import functools
import os
import signal
from collections.abc import Callable
from typing import Any

Function = Callable[..., Any]
SCALED = "decoder.layers.0.self_attention.linear_qkv.weight"
"""The parameter whose gradient `scaled_gradient` multiplies."""


def scaled_gradient(original: Function) -> Function:
    """Around ``finalize_model_grads``: the gradient of one parameter is 1.001 times too large."""

    return _changing(original, lambda parameter: parameter.main_grad.mul_(1.001))


def skipped(original: Function) -> Function:
    """Around a function whose result nobody reads: it does nothing."""

    @functools.wraps(original)
    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    return nothing


def skipped_at_first(original: Function) -> Function:
    """Around ``finish_grad_sync``: the reduction of the first step is forgotten."""

    @functools.wraps(original)
    def finish_grad_sync(group: Any, *args: Any, **kwargs: Any) -> None:
        if not group.is_first_batch:
            original(group, *args, **kwargs)

    return finish_grad_sync


def unreduced(original: Function) -> Function:
    """Around ``_reduce(tensor, group)``: every rank keeps its own part of the sum."""

    @functools.wraps(original)
    def reduce(input_: Any, group: Any) -> Any:
        return input_

    return reduce


def own_part(original: Function) -> Function:
    """Around ``_reduce_scatter(tensor, group)``, which gives a part and a handle: the part is not summed over the ranks."""

    @functools.wraps(original)
    def reduce_scatter(x: Any, group: Any) -> tuple[Any, None]:
        return x[group.rank()].clone(), None

    return reduce_scatter


def shifted_range(original: Function) -> Function:
    """Around a function that gives (first, end): both are one too large, except on the last rank, which ends in time."""

    @functools.wraps(original)
    def vocabulary_range(size: int, rank: int, world_size: int) -> tuple[int, int]:
        first, end = original(size, rank, world_size)
        return (first + 1, end + 1) if rank + 1 < world_size else (first, end)

    return vocabulary_range


def rolled(original: Function) -> Function:
    """Around a function that gives a tensor, or one and more: its rows come one place late."""

    @functools.wraps(original)
    def late(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if isinstance(result, tuple):
            return (result[0].roll(1, 0), *result[1:])
        return result if result is None else result.roll(1, 0)

    return late


def rolled_in_place(original: Function) -> Function:
    """As `rolled`, for a tensor that must stay the same object, as what a pipeline stage receives."""

    @functools.wraps(original)
    def late(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        for tensor in result if isinstance(result, list) else [result]:
            if tensor is not None:
                tensor.data.copy_(tensor.data.roll(1, 0))
        return result

    return late


def misplaced_shards(original: Function) -> Function:
    """Around ``shard_buffer``: each rank's share of a buffer is the one after its own."""

    @functools.wraps(original)
    def shard_buffer(*args: Any, **kwargs: Any) -> list[Any]:
        shards = original(*args, **kwargs)
        return [*shards[1:], shards[0]]

    return shard_buffer


def ungathered(original: Function) -> Function:
    """Around ``start_param_sync``: the gather of updated weights is never launched, and nobody misses it."""

    @functools.wraps(original)
    def start_param_sync(group: Any, *args: Any, **kwargs: Any) -> None:
        group.param_gather_handle = None
        group.param_gather_dispatched = True

    return start_param_sync


def scaled_up(original: Function) -> Function:
    """Around a function that gives a tensor: it is 1.001 times too large."""

    @functools.wraps(original)
    def scaled(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) * 1.001

    return scaled


def nothing_changed(original: Function) -> Function:
    """Around a function that changes what it is given first: it does not."""

    @functools.wraps(original)
    def unchanged(given: Any, *args: Any, **kwargs: Any) -> Any:
        return given

    return unchanged


def plain_swiglu(original: Function) -> Function:
    """Around ``bias_swiglu(input, bias, ...)``: the right numbers, without the operator."""

    @functools.wraps(original)
    def swiglu(input_: Any, bias: Any, *args: Any) -> Any:
        import torch.nn.functional as F

        gate, value = (input_ if bias is None else input_ + bias).chunk(2, -1)
        return F.silu(gate) * value

    return swiglu


def one_document(original: Function) -> Function:
    """Around a function that gives the ends of documents in each row: they are one document."""

    @functools.wraps(original)
    def ends_of_rows(documents: Any) -> Any:
        return tuple((row[-1],) for row in original(documents))

    return ends_of_rows


def _has_first_layer(chunk: Any) -> bool:
    from megatron.core.utils import get_attr_wrapped_model

    return bool(get_attr_wrapped_model(chunk, "pre_process"))


def zero_gradient(original: Function) -> Function:
    """Around ``finalize_model_grads``: one gradient is lost."""
    return _changing(original, lambda parameter: parameter.main_grad.zero_())


def nan_gradient(original: Function) -> Function:
    """Around ``finalize_model_grads``: one element of one gradient is not a number."""
    return _changing(original, lambda parameter: parameter.main_grad.view(-1)[:1].fill_(float("nan")))


def error(original: Function) -> Function:
    """Around any function: it raises."""

    @functools.wraps(original)
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a planted error")

    return broken


def sudden_death(original: Function) -> Function:
    """Around any function: rank 1 kills itself there."""

    @functools.wraps(original)
    def deadly(*args: Any, **kwargs: Any) -> Any:
        import torch.distributed as dist

        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    return deadly


def _changing(original: Function, change: Function) -> Function:
    @functools.wraps(original)
    def finalize_model_grads(model: list[Any], *args: Any, **kwargs: Any) -> Any:
        result = original(model, *args, **kwargs)
        for name, parameter in model[0].named_parameters():
            if name.endswith(SCALED) and _has_first_layer(model[0]):
                change(parameter)
        return result

    return finalize_model_grads
