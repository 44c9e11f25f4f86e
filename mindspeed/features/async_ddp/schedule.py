"""Makes a schedule hold back gradient reduction until the last micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def held_back_reduction(chunks: Sequence[Any]) -> Iterator[None]:
    """Fill in a missing ``config.no_sync_func`` of model chunks that reduce gradients behind backward, for one pass.

    Not earlier, because Megatron-LM fills it in itself and refuses one that is already there.
    """
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.utils import get_model_config

    config = get_model_config(chunks[0])
    if config.no_sync_func is not None or not all(isinstance(chunk, DistributedDataParallel) for chunk in chunks):
        yield
        return
    functions = [chunk.no_sync for chunk in chunks]
    config.no_sync_func = functions if len(functions) > 1 else functions[0]
    try:
        yield
    finally:
        config.no_sync_func = None
