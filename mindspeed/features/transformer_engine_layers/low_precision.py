"""Functions of ``transformer_engine.pytorch.fp8`` and ``.distributed``: nothing here multiplies in low precision."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from mindspeed.features.transformer_engine_layers.interface import refuse


def check_fp8_support() -> tuple[bool, str]:
    """Return that fp8 is not supported, and why."""
    return False, "Transformer Engine is not installed"


check_mxfp8_support = check_fp8_block_scaling_support = check_fp8_support


def fp8_autocast(enabled: bool = True, **options: Any) -> AbstractContextManager[None]:
    """Return a context that changes nothing; raises MS338 where fp8 is enabled."""
    if enabled:
        refuse("transformer_engine.pytorch.fp8.fp8_autocast", "multiplies in fp8", "remove fp8")
    return nullcontext()


def activation_recompute_forward(
    activation_recompute: bool = False, recompute_phase: bool = False
) -> AbstractContextManager[None]:
    """Return a context that changes nothing: there are no scales of fp8 that a recomputation must not update."""
    return nullcontext()


class FP8GlobalStateManager:
    """State of fp8, which is never enabled."""

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """Return False."""
        return False
