"""Megatron's checkpoints where there is no Transformer Engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from copy import copy
from typing import Any

from torch.nn import Module

from mindspeed.job.world import share_of_chunk
from mindspeed.memory.model_layers import blocks_of
from mindspeed.memory.region_checkpoint import RegionCheckpoint, make_region


def with_shares(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around ``get_megatron_optimizer(config, model_chunks, ...)``: deal the layers of a rank out to its model chunks."""

    @functools.wraps(original)
    def wrapper(config: Any, model_chunks: Any, *args: Any, **kwargs: Any) -> Any:
        for number, chunk in enumerate(model_chunks):
            for block in blocks_of([chunk]):
                block.config = copy(block.config)
                layers = share_of_chunk(block.config.recompute_num_layers, number, len(model_chunks))
                block.config.recompute_num_layers = layers
        return original(config, model_chunks, *args, **kwargs)

    return wrapper


class LocalCheckpoint(RegionCheckpoint):
    """Mixin of ``CheckpointWithoutOutput``: without Transformer Engine nothing is fp8, and a norm is a region."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not _has_transformer_engine():
            self.fp8 = False

    def checkpoint(self, run_function: Callable[..., Any], *args: Any) -> Any:
        """Compute the function of ``args``, a norm in its region."""
        if isinstance(run_function, Module) and not _has_transformer_engine():
            make_region(run_function, "recompute", "a norm")
        return super().checkpoint(run_function, *args)


def _has_transformer_engine() -> bool:
    from megatron.core.tensor_parallel import random

    return bool(random.HAVE_TE)
