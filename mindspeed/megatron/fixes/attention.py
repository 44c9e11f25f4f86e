"""Fix Megatron's local core attention and its positions for multi-latent attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, Final

from megatron.core.utils import get_te_version

HAVE_ENGINE: Final = get_te_version() is not None
"""True if Transformer Engine is there."""


def take_widths(init: Callable[..., None]) -> Callable[..., None]:
    """``DotProductAttention.__init__`` with the widths that multi-latent attention gives and only Transformer Engine's takes:
    ``k_channels`` of a query and a key, which nothing in it needs to know, and ``v_channels`` of a value and the result."""

    @wraps(init)
    def made(
        core: Any, config: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any
    ) -> None:
        init(core, config, *args, **kwargs)
        if v_channels is not None:
            core.hidden_size_per_partition = core.num_attention_heads_per_partition * v_channels

    return made


def made_on_host(init: Callable[..., None]) -> Callable[..., None]:
    """``YarnRotaryEmbedding.__init__`` with the frequencies made on the host."""

    @wraps(init)
    def made(embedding: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature(init).bind(embedding, *args, **kwargs)
        bound.arguments["use_cpu_initialization"] = True
        init(*bound.args, **bound.kwargs)

    return made
