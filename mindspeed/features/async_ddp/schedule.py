"""Tells a schedule how to hold back gradient reduction until the last micro-batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def with_no_sync(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``get_forward_backward_func``: a missing ``config.no_sync_func`` is filled in when a step begins.

    That late, because Megatron-LM fills it in itself and refuses one that is already there.
    """

    @functools.wraps(original)
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        schedule = original(*args, **kwargs)

        @functools.wraps(schedule)
        def forward_backward(**arguments: Any) -> Any:
            hold_back_reduction(arguments["model"])
            return schedule(**arguments)

        return forward_backward

    return get_forward_backward_func


def hold_back_reduction(model: Any) -> None:
    """Set ``no_sync_func`` in the configuration of a model, or list of model chunks, that reduces gradients behind backward."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.utils import get_model_config

    chunks = model if isinstance(model, list) else [model]
    config = get_model_config(chunks[0])
    if config.no_sync_func is None and all(isinstance(chunk, DistributedDataParallel) for chunk in chunks):
        functions = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = functions if len(functions) > 1 else functions[0]
