"""Patches for features that take main weights or states away, recompute MLPs as a whole, or count collectives. Light."""

from __future__ import annotations

from typing import Any, Final

from mindspeed.files.tables import table_beside
from mindspeed.platforms.cpu import COLLECTIVES
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


def counted_collectives(reason: str) -> list[Patch]:
    """Return the wraps by which `mindspeed.platforms.runtime.traffic` counts collectives, on platforms other than the CPU."""
    counted, module = "mindspeed.platforms.collectives:counted", "torch.distributed.distributed_c10d"
    return [Wrap(f"{module}:{name}", counted, reason, optional=True) for name in COLLECTIVES]
