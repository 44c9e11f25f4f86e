"""Let Megatron's configuration accept the permutation that the operators replace. Light."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def with_permute_fusion(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``TransformerConfig.__post_init__``: ``moe_permute_fusion`` is accepted, because this feature provides it."""

    @functools.wraps(original)
    def post_init(config: Any, *args: Any) -> None:
        fusion, config.moe_permute_fusion = config.moe_permute_fusion, False
        try:
            original(config, *args)
        finally:
            config.moe_permute_fusion = fusion

    return post_init
