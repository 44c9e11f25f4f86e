"""Modules of a built model that a schedule cannot run with. Imported when the model exists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from mindspeed.plugins.feature import Feature

_GATHERED: Final = "fully sharded parameters are gathered in the order of Megatron's schedule"
_FUSED: Final = "linear layers of Transformer Engine compute both gradients at once"
_SHARDED: Final = {
    "megatron.core.distributed.fsdp": _GATHERED,
    "megatron.core.distributed.torch_fully_sharded_data_parallel": _GATHERED,
}
_FOREIGN: Final = {"megatron.core.extensions.transformer_engine": _FUSED, "transformer_engine": _FUSED, **_SHARDED}
"""Packages of modules, and the reason against them."""


def foreign_modules(feature: Feature[Any], chunks: Iterable[Any]) -> list[str]:
    """Return a sentence for each class of linear layer or of sharded parameters that splits no backward pass."""
    return _found(chunks, _FOREIGN)


def sharded_modules(feature: Feature[Any], chunks: Iterable[Any]) -> list[str]:
    """Return a sentence for each class of sharded parameters, which are missing when a forward pass is repeated early."""
    return _found(chunks, _SHARDED)


def _found(chunks: Iterable[Any], packages: Mapping[str, str]) -> list[str]:
    kinds = {type(module) for chunk in chunks for module in chunk.modules() if next(module.parameters(False), None) is not None}
    kinds |= {type(chunk) for chunk in chunks}
    return sorted(
        f"the model has {kind.__qualname__}: {reason}"
        for kind in kinds
        for package, reason in packages.items()
        if f"{kind.__module__}.".startswith(f"{package}.") and ("Linear" in kind.__name__ or "Parallel" in kind.__name__)
    )
