"""The one configuration value of a pipeline that is not a plain number: the type of what stages send."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def with_pipeline_dtype(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``ModelParallelConfig.__post_init__``: a missing ``pipeline_dtype`` is that of the activations."""

    @functools.wraps(original)
    def post_init(config: Any, *args: Any) -> None:
        if config.pipeline_dtype is None:
            config.pipeline_dtype = activation_dtype(config)
        original(config, *args)

    return post_init


def activation_dtype(config: Any) -> torch.dtype:
    """Type of the hidden states that a model of this configuration passes on.

    Megatron's ``Float16Module`` casts the model to the half type that is switched on, whatever ``params_dtype`` says.
    """
    if config.bf16:
        return torch.bfloat16
    if config.fp16:
        return torch.float16
    dtype: torch.dtype = config.params_dtype
    return dtype
