"""Patches of Megatron's optimizers for features that take main weights or states away. Light."""

from __future__ import annotations

from mindspeed.plugins.patches import Patch, Wrap
from mindspeed.plugins.tables import table_beside


def optimizer_patches() -> list[Patch]:
    """Return the wraps of what reads or writes main weights and states. Each optimizer has its own of them."""
    wrappers = "mindspeed.memory.optimizer_windows"
    return [Wrap(value=f"{wrappers}:{row.pop('by')}", optional=True, **row) for row in table_beside(__file__)]
