"""Arguments of Megatron-LM that its local layers (``--transformer-impl local``) ignore or cannot build. Light."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

from mindspeed.megatron.training_flags import Values
from mindspeed.plugins.problems import Problem


@dataclass(frozen=True, slots=True)
class Unsupported:
    """An argument by its dest, and when and why local layers do not support it."""

    dest: str
    option: str
    reason: str
    applies: Callable[[Values], bool]


def _is_set(dest: str) -> Callable[[Values], bool]:
    return lambda values: bool(values.get(dest))


def _is_torch_layer_norm(values: Values) -> bool:
    is_layer_norm = values.get("normalization") in (None, "LayerNorm")
    return bool(values.get("layernorm_zero_centered_gamma")) and is_layer_norm and find_spec("apex") is None


UNSUPPORTED: Final = (
    Unsupported("fp8", "--fp8-format", "they ignore it and compute without fp8", _is_set("fp8")),
    Unsupported("fp4", "--fp4-format", "they ignore it and compute without fp4", _is_set("fp4")),
    Unsupported(
        "layernorm_zero_centered_gamma",
        "--apply-layernorm-1p",
        "their norm is torch's LayerNorm, which has no zero-centered weight",
        _is_torch_layer_norm,
    ),
)


def unsupported_arguments(values: Values, source: Callable[[Unsupported], str]) -> list[Problem]:
    """MS605 for every argument in ``values`` that local layers do not support; none for other layers.

    ``values`` are Megatron-LM's arguments by dest with the plan's in place; ``source`` names where an argument comes from.
    """
    if values.get("transformer_impl") != "local":
        return []
    return [_problem(row, values[row.dest], source(row)) for row in UNSUPPORTED if row.applies(values)]


def _problem(row: Unsupported, value: Any, source: str) -> Problem:
    text = f"{source} gives {value!r}, and the layers are local (transformer_impl): {row.reason}"
    return Problem("MS605", text, where=source, fix=f"remove {row.option}")
