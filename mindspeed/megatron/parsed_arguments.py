"""Problems of the arguments that Megatron-LM has parsed, against the plan and against the layers that are built. Light."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Final

from mindspeed.engine.planning.plan import PlannedOverride
from mindspeed.job.fact import Values
from mindspeed.plugins.problems import Problem

_THEIR: Final = "Megatron's "


def contradiction(planned: PlannedOverride, source: str, value: Any, wanted: Any) -> Problem:
    """MS605 for one argument: ``source`` gives ``value``, the plan ``wanted``."""
    owners = " and ".join(planned.owners)
    text = f"{source} gives {value!r}, and {owners} needs {wanted!r}: {planned.override.reason}"
    fix = f"remove {source.removeprefix(_THEIR)} or {owners}"
    if "--" not in source:
        fix = f"change it where Megatron reads it, or remove {owners}"
    return Problem("MS605", text, planned.owners, where=source, fix=fix)


_UNSUPPORTED: Final = {
    "delay_wgrad_compute": ("--delay-wgrad-compute", "only Transformer Engine's compute the gradients of weights later"),
    "fp8": ("--fp8-format", "they ignore it and compute without fp8"),
    "fp4": ("--fp4-format", "they ignore it and compute without fp4"),
    "layernorm_zero_centered_gamma": (
        "--apply-layernorm-1p",
        "their norm is torch's LayerNorm, which has no zero-centered weight",
    ),
}
"""Arguments that Megatron's local layers (``--transformer-impl local``) ignore or cannot build: option and reason."""


def unsupported_arguments(values: Values, sources: Mapping[str, str]) -> list[Problem]:
    """MS605 for every argument in ``values`` that local layers do not support; none for other layers.

    ``values`` are Megatron-LM's arguments by dest with the plan's in place; ``sources`` names where an argument comes from.
    """
    has_torch_norm = values.get("normalization") in (None, "LayerNorm") and find_spec("apex") is None
    problems = []
    for dest, (option, reason) in _UNSUPPORTED.items() if values.get("transformer_impl") == "local" else ():
        if values.get(dest) and (has_torch_norm or dest != "layernorm_zero_centered_gamma"):
            source = sources.get(dest, f"Megatron's argument {dest}")
            text = f"{source} gives {values[dest]!r}, and the layers are local (transformer_impl): {reason}"
            problems.append(Problem("MS605", text, where=source, fix=f"remove {option}"))
    return problems
