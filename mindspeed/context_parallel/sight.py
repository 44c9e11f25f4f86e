"""What queries see, as Megatron's core attention hands it to an algorithm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from mindspeed.context_parallel.documents import Ends


@dataclass(frozen=True)
class Sight:
    """Which keys a query sees, and how far away they seem.

    ``mask``, True where hidden, is None when ``causal``; its rows are those that an algorithm asks for in its slicing of a
    batch, its columns all tokens. ``slopes`` [heads of this rank] are those of ALiBi.
    """

    causal: bool
    mask: Tensor | None = None
    ends: Ends = ()
    slopes: Tensor | None = None
