"""Let Megatron's configuration describe experts with biases that tensor-parallel ranks share. Light."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def with_shared_biases(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``TransformerConfig.__post_init__``: biases, which it refuses on tensor-parallel ranks, are set when it has run."""

    @functools.wraps(original)
    def post_init(config: Any, *args: Any) -> None:
        config.add_bias_linear, biases = False, config.add_bias_linear
        original(config, *args)
        config.add_bias_linear = biases

    return post_init
