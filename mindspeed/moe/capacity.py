"""Compute the capacity of experts and what features ask of such a layer. Light."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Final, Literal

from mindspeed.megatron.module_specs import with_parts

SHAPES: Final = 8
"""Different capacities of a run with padding."""


def capacity_of(tokens: int, experts: int, topk: int, factor: float, minimum: int) -> int:
    """Places of an expert: ``tokens / experts x factor x topk``, rounded up, at least ``minimum`` and at most ``tokens``."""
    exact = Fraction(tokens * topk, experts) * Fraction(str(factor))
    return min(max(math.ceil(exact), minimum), tokens)


@dataclass(frozen=True, slots=True)
class CapacityOptions:
    """Tell a layer with a capacity what features ask of it; its spec carries them to the module.

    ``reference`` is the formula: every expert on every token. ``rearranged`` copies rows by index, instead of products with
    masks. ``dropless`` gives experts as many places as the fullest one needs, with ``padding`` in eighths of a group's tokens.
    With ``parts`` > 0 experts are computed in units, one expert and one of so many slices of its places; ``streams`` keeps
    transfers of tensor ranks and of ranks with other experts apart.
    """

    capacity_factor: float = 1.0
    eval_capacity_factor: float = 1.0
    min_capacity: int = 4
    noise: Literal["none", "jitter", "rsample"] = "none"
    random_priority: bool = False
    sinkhorn: bool = False
    groups: int | None = None
    reference: bool = False
    rearranged: bool = False
    dropless: bool = False
    padding: bool = False
    parts: int = 0
    streams: bool = False

    def capacity(self, tokens: int, experts: int, topk: int, training: bool) -> int:
        """The places of an expert for ``tokens`` of a group."""
        factor = self.capacity_factor if training else self.eval_capacity_factor
        return capacity_of(tokens, experts, topk, factor, self.min_capacity)

    def padded(self, need: int, tokens: int) -> int:
        """The places of an expert where ``need`` of them drop nothing."""
        step = -(-tokens // SHAPES) if self.padding else 1
        return min(-(-max(need, 1) // step) * step, tokens)


def with_options(spec: Any, **changes: Any) -> Any:
    """Copy a spec with other options of every layer that has a capacity."""

    def changed(name: str, part: Any) -> Any:
        options = _options(part)
        return replace(part, params={**part.params, "options": replace(options, **changes)}) if options else part

    return with_parts(spec, changed)


def _options(part: Any) -> CapacityOptions | None:
    options = getattr(part, "params", {}).get("options") if hasattr(part, "module") else None
    return options if isinstance(options, CapacityOptions) else None
