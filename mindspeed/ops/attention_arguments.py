"""The arguments of fused attention in the order of its schema, grouped."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class AttentionOptions(NamedTuple):
    """Hold the arguments of a call other than its tensors, in the order of the schema."""

    heads: int
    layout: str
    scale: float
    keep_prob: float
    before: int
    after: int
    prefix: list[int] | None
    q_ends: list[int] | None
    kv_ends: list[int] | None
    mode: int
    pse_type: int
    q_start: int
    kv_start: int


class AttentionGradientInputs(NamedTuple):
    """The arguments of the operator's gradient, in the order of the schema."""

    dout: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    pse: Tensor | None
    mask: Tensor | None
    state: Tensor | None
    out: Tensor
    maximum: Tensor
    total: Tensor
    of_pse: bool
    options: AttentionOptions

    @classmethod
    def of(cls, *args: Any) -> AttentionGradientInputs:
        """Group the arguments of the schema, whose last ones are the options."""
        return cls._make((*args[:11], AttentionOptions(*args[11:])))
