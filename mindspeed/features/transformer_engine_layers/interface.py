"""The interface of Transformer Engine that the roles have, and the refusal of what they do not provide."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NoReturn

from mindspeed import plugins as ms

VERSION: Final = "2.9.0"
"""Version of Transformer Engine whose interface the roles have."""
_NAME: Final = "transformer-engine-layers"


def refuse(role: str, what: str, fix: str) -> NoReturn:
    """Raise MS338 for an option or a part of Transformer Engine that does not exist here."""
    raise ms.MindSpeedError([ms.Problem("MS338", f"{_NAME}: {role} {what}", (_NAME,), fix=ms.Fix.advise(fix))])


def refuse_unknown(role: str, options: Mapping[str, Any]) -> None:
    """Raise MS338 for keywords that the interface does not have, unless they have no value."""
    if given := [name for name, value in options.items() if value is not None]:
        refuse(
            role,
            f"does not support {', '.join(given)}: it follows the interface of Transformer Engine {VERSION}",
            "use a megatron-core version that mindspeed supports",
        )


_UNSUPPORTED: Final = {
    "fp8": "multiplies in fp8",
    "fp4": "multiplies in fp4",
    "tp_comm_overlap": "overlaps tensor-parallel collectives by user buffers",
    "symmetric_ar_type": "reduces through symmetric memory",
    "init_model_with_meta_device": "creates its weights on the meta device",
}
"""Options of a configuration that the roles do not have, each with its meaning."""


def refuse_options(role: str, config: Any) -> None:
    """Raise MS338 for options of a configuration that only a real Transformer Engine has."""
    for option, meaning in _UNSUPPORTED.items():
        if getattr(config, option, None):
            refuse(role, f"does not support {option}, which {meaning}", f"set {option} to None or False")


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
