"""Arguments of Megatron-LM whose defaults need CUDA: their values on the CPU, and its parser with these as defaults."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

ARGUMENTS: Final[tuple[tuple[str, str | bool, str], ...]] = (
    # (argument of Megatron-LM, value, why its own default cannot hold)
    ("distributed_backend", "gloo", "nccl needs CUDA devices"),
    ("transformer_impl", "local", "Transformer Engine needs CUDA"),
    ("gradient_accumulation_fusion", False, "the fused kernel is Apex's and needs CUDA"),
    ("masked_softmax_fusion", False, "the fused kernel needs CUDA"),
    ("apply_rope_fusion", False, "the fused kernel is Transformer Engine's and needs CUDA"),
    ("dist_ckpt_optim_fully_reshardable", True, "the other format of a distributed optimizer loses the step of torch's Adam"),
    ("persist_layer_norm", False, "the persistent kernel is Apex's and needs CUDA"),
)
_NEGATED: Final = {"persist_layer_norm": "no_persist_layer_norm"}
_PARSED: Final = {_NEGATED.get(name, name): not value if name in _NEGATED else value for name, value, _ in ARGUMENTS}
"""The same by the attributes of the parsed arguments."""


def with_defaults(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around ``parse_args(extra_args_provider=None, ignore_unknown_args=False)``: the CPU's defaults in place of Megatron's.

    A value that the command line or a file gives stays, unless it is Megatron's default.
    """

    @functools.wraps(original)
    def parse_args(*args: Any, **kwargs: Any) -> Any:
        from mindspeed.inspection.cli_arguments import surface
        from mindspeed.inspection.megatron_copies import megatron_version

        parsed = original(*args, **kwargs)
        known = surface(megatron_version() or "")
        for name, value in _PARSED.items():
            rows = known.by_dest.get(name) if known is not None else None
            if rows and getattr(parsed, name, value) == rows[0].default:
                setattr(parsed, name, value)
        return parsed

    return parse_args
