"""Patches of Megatron for features that take main weights or states away, or recompute MLPs as a whole. Light."""

from __future__ import annotations

from typing import Any, Final

from mindspeed.files.tables import table_beside
from mindspeed.plugins.patches import Patch, Wrap

WHOLE_MLPS: Final = Wrap(
    "megatron.core.tensor_parallel.random:checkpoint",
    "mindspeed.memory.recomputation:with_copied_parameters",
    reason="keeps a bias that is returned separately from the output out of the autograd graph",
)

_ROWS: Final[list[dict[str, Any]]] = table_beside(__file__)


def optimizer_patches() -> list[Patch]:
    """Return the wraps of functions that read or write main weights and states; each optimizer has separate ones."""
    return [Wrap(**row, optional=True) for row in _ROWS]
