"""The interface of Transformer Engine that the roles have, and the refusal of what they do not provide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NoReturn

from mindspeed import plugins as ms

VERSION: Final = "2.9.0"
"""Version of Transformer Engine whose interface the roles have."""
_NAME: Final = "transformer-engine-layers"


def refuse(role: str, what: str, fix: str) -> NoReturn:
    """Raise MS338 for an option or a part of Transformer Engine that does not exist here."""
    raise ms.MindSpeedError([ms.Problem("MS338", f"{_NAME}: {role} {what}", (_NAME,), fix=ms.Advice(fix))])


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
