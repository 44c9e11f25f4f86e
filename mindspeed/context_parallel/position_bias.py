"""Linear position bias (ALiBi, arXiv 2108.12409): what is added to the score of a query and a key, by their distance."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

Form = Literal["distance", "root", "signed"]
"""The factor of a slope: ``-|query - key|``, ``-sqrt |query - key|``, or ``key - query``."""


def slopes_of(heads: int) -> tuple[float, ...]:
    """Make a slope for each head: ``2 ** (-8 (i + 1) / heads)`` for a power of two.

    Any other number takes those of the power of two below, then every second one of twice that power.
    """
    power = 1 << heads.bit_length() - 1
    more = [2 ** (-4 * (i + 1) / power) for i in range(0, 2 * (heads - power), 2)]
    return (*(2 ** (-8 * (i + 1) / power) for i in range(power)), *more)


@dataclass(frozen=True, slots=True)
class PositionBias:
    """``slopes`` of the heads, at first of all heads of the model.

    ``matrix``: an operator that could work from slopes shall get the values. ``fill``: keys after the query get ``-inf``, which
    hides them; that takes a matrix, as the signed form does.
    """

    slopes: tuple[float, ...]
    form: Form = "distance"
    matrix: bool = False
    fill: bool = False

    def of_rank(self, groups: Any) -> PositionBias:
        """Take the slopes of this tensor-parallel rank in ``groups``, Megatron's collection, or else in its global group."""
        tensor = getattr(groups, "tp", None)
        if tensor is None:
            from megatron.core import parallel_state

            tensor = parallel_state.get_tensor_model_parallel_group()
        heads = len(self.slopes) // tensor.size()
        return replace(self, slopes=self.slopes[tensor.rank() * heads : (tensor.rank() + 1) * heads])

    @lru_cache(maxsize=8)  # noqa: B019 - what is kept is small and needed by every layer
    def slopes_on(self, device: torch.device) -> Tensor:
        """[heads], fp32."""
        with torch.inference_mode(False):  # training may come after
            return torch.tensor(self.slopes, dtype=torch.float32, device=device)

    @lru_cache(maxsize=2)  # noqa: B019 - all layers share one matrix
    def values(self, rows: int, keys: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """[heads, rows, keys] for the last ``rows`` queries, the last of which stands at the last key. Not to be changed."""
        with torch.inference_mode(False):
            places = torch.arange(keys, dtype=torch.float64, device=device)
            behind = places - places[keys - rows :, None]
            by_form = {"distance": -behind.abs(), "root": -behind.abs().sqrt(), "signed": behind}
            values = torch.tensor(self.slopes, dtype=torch.float64, device=device)[:, None, None] * by_form[self.form]
            return (values.masked_fill(behind > 0, -torch.inf) if self.fill else values).to(dtype)
