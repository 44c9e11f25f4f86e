"""The interface of Transformer Engine that the roles have, and the refusal of what they do not provide."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NoReturn

from mindspeed import plugins as ms

VERSION: Final = "2.9.0"
"""Version of Transformer Engine whose interface the roles have."""
MXFP8: Final = "mxfp8"
"""The recipe of fp8 that the roles have."""
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


UNSUPPORTED: Final = {
    "fp4": "multiplies in fp4",
    "fp8_param": "stores weights in fp8",
    "fp8_dot_product_attention": "computes attention in fp8",
    "fp8_multi_head_attention": "computes attention in fp8",
    "tp_comm_overlap": "overlaps tensor-parallel collectives by user buffers",
    "symmetric_ar_type": "reduces through symmetric memory",
    "init_model_with_meta_device": "creates its weights on the meta device",
}
"""Options of a configuration that the roles do not have, each with its meaning."""


def refuse_options(role: str, config: Any) -> None:
    """Raise MS338 for options of a configuration that only a real Transformer Engine has."""
    for option, meaning in UNSUPPORTED.items():
        if getattr(config, option, None):
            refuse(role, f"does not support {option}, which {meaning}", f"set {option} to None or False")
    recipe = getattr(config, "fp8_recipe", None)
    if getattr(config, "fp8", None) and getattr(recipe, "value", recipe) != MXFP8:
        refuse(role, f"does not support the fp8 recipe {getattr(recipe, 'value', recipe)}", f"set fp8_recipe to {MXFP8}")


def check_fp8_support() -> tuple[bool, str]:
    """Return that fp8 is not supported, and why."""
    return False, "Transformer Engine is not installed"


check_mxfp8_support = check_fp8_block_scaling_support = check_fp8_support


def fp8_autocast(enabled: bool = True, fp8_recipe: Any = None, **options: Any) -> AbstractContextManager[None]:
    """Return a context in which linear layers multiply in fp8, by a recipe that `FP8GlobalStateManager` has given.

    Raises MS338 for another recipe, and for none where fp8 is enabled.
    """
    from mindspeed.features.transformer_engine_layers import mxfp8

    if enabled and not isinstance(fp8_recipe, mxfp8.Mxfp8Recipe):
        role = "transformer_engine.pytorch.fp8.fp8_autocast"
        refuse(role, "multiplies in fp8 only by the recipe of Megatron's configuration", "set fp8 and fp8_recipe there")
    return mxfp8.quantized(fp8_recipe if enabled else None)


def activation_recompute_forward(
    activation_recompute: bool = False, recompute_phase: bool = False
) -> AbstractContextManager[None]:
    """Return a context that changes nothing: there are no scales of fp8 that a recomputation must not update."""
    return nullcontext()


class FP8GlobalStateManager:
    """State of fp8 for code that repeats a forward pass later."""

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """Return whether linear layers multiply in fp8."""
        return cls.get_fp8_recipe() is not None

    @classmethod
    def get_fp8_recipe(cls) -> Any:
        """Return the recipe by which linear layers multiply, None where they keep their type."""
        from mindspeed.features.transformer_engine_layers import mxfp8

        return mxfp8.active()
