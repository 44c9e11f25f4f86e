"""Stand-ins for Megatron's two fused activation functions, with their signatures."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from mindspeed.ops.swiglu import swiglu
from mindspeed.plugins.problems import MindSpeedError, Problem


def check_config(config: Any) -> None:
    """Raise MS304 unless the activation of this configuration is what the stand-ins compute, option by option."""
    wrong = {
        "activation_func is not silu": config.activation_func is not F.silu,
        "gated_linear_unit is off": not config.gated_linear_unit,
        # since Megatron 0.15
        "activation_func_clamp_value is set": getattr(config, "activation_func_clamp_value", None) is not None,
        "activation_func_fp8_input_store is set": config.activation_func_fp8_input_store,
        "cpu_offloading is set": config.cpu_offloading,
    }
    problems = [
        Problem("MS304", f"swiglu: {sentence} in the model that is being built", ("swiglu",), fix="take out swiglu")
        for sentence, holds in wrong.items()
        if holds
    ]
    if problems:
        raise MindSpeedError(problems)


def bias_swiglu(input: Tensor, bias: Tensor | None, fp8_input_store: bool = False, cpu_offload_input: bool = False) -> Tensor:
    """SwiGLU of ``input + bias`` over the last dimension; `check_config` has refused what the flags stand for."""
    return swiglu(input if bias is None else input + bias)


def weighted_bias_swiglu(input: Tensor, bias: Tensor | None, weights: Tensor, fp8_input_store: bool = False) -> Tensor:
    """SwiGLU of ``input + bias`` times one weight per token, ``weights`` being [tokens, 1] and possibly of a wider type."""
    return (swiglu(input if bias is None else input + bias) * weights).to(input.dtype)
