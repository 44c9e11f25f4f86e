"""Wrappers of Megatron's two fused activation functions, and the configurations that they are for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from mindspeed import plugins as ms
from mindspeed.job.config import world_of_config
from mindspeed.ops.swiglu import swiglu
from mindspeed.plugins.conditions import obstacle


def fits(config: Any) -> bool:
    """Return whether Megatron's fused activation of a configuration is that of the operator."""
    from mindspeed.features.swiglu.feature import Swiglu

    try:
        return obstacle(Swiglu.spec.constraints, Swiglu.spec.name, Swiglu.Args(), ms.World(world_of_config(config))) is None
    except ms.UnknownValue:  # a function that no argument asks for
        return False


def _any_set(*options: Any) -> bool:
    """Return whether an option asks for what the operator does not compute; a clamp of zero does."""
    return any(option is not None and option is not False for option in options)


def with_operator(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Around ``bias_swiglu_impl``: SwiGLU of ``input + bias`` over the last dimension.

    Megatron's own stores its input in fp8 or on the host, and since 0.20 clamps: any of these ``options`` calls it.
    """

    @functools.wraps(original)
    def bias_swiglu(input: Tensor, bias: Tensor | None, *options: Any, **named: Any) -> Tensor:
        if _any_set(*options, *named.values()):
            return original(input, bias, *options, **named)
        return swiglu(input if bias is None else input + bias)

    return bias_swiglu


def with_weighted_operator(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Around ``weighted_bias_swiglu_impl``: SwiGLU of ``input + bias`` times one weight per token.

    ``weights`` is [tokens, 1] and possibly of a wider type.
    """

    @functools.wraps(original)
    def weighted_bias_swiglu(input: Tensor, bias: Tensor | None, weights: Tensor, *options: Any, **named: Any) -> Tensor:
        if _any_set(*options, *named.values()):
            return original(input, bias, weights, *options, **named)
        return (swiglu(input if bias is None else input + bias) * weights).to(input.dtype)

    return weighted_bias_swiglu
