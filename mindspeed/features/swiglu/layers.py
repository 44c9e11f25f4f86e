"""Wrappers of Megatron's two fused activation functions, and the configurations that they are for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from mindspeed.ops.swiglu import swiglu


def misfits(config: Any) -> list[str]:
    """List the options of a configuration that the operator does not compute; empty if it fits."""
    wrong = {
        "activation_func is not silu": config.activation_func is not F.silu,
        "gated_linear_unit is off": not config.gated_linear_unit,
        # since Megatron 0.15
        "activation_func_clamp_value is set": getattr(config, "activation_func_clamp_value", None) is not None,
        "glu_linear_offset is set": getattr(config, "glu_linear_offset", 0.0) != 0.0,
        "activation_func_fp8_input_store is set": config.activation_func_fp8_input_store,
        "cpu_offloading is set": config.cpu_offloading,
        "use_te_activation_func is set": getattr(config, "use_te_activation_func", False),
    }
    return [sentence for sentence, holds in wrong.items() if holds]


def fits(config: Any) -> bool:
    """Tell whether Megatron's fused activation of a configuration is that of the operator."""
    return not misfits(config)


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
