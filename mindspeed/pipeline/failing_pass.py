"""Notes to errors, with the operation of a schedule in which they were raised."""

from __future__ import annotations

import traceback
from typing import Final

from torch import nn

from mindspeed.pipeline.operations import Op
from mindspeed.process.place import PLACE

_NAMES: Final = {"F": "forward pass", "B": "input gradient", "W": "weight gradient", "D": "backward pass", "R": "recomputation"}


def add_place(error: Exception, op: Op, stage: int) -> None:
    """Add to an error's traceback the operation with its pipeline stage, and the layer. Before Python 3.11 it has no notes."""
    if hasattr(error, "add_note"):
        name = f"{_NAMES[op.kind]} of micro-batch {op.micro_batch}, model chunk {op.chunk} (pipeline stage {stage})"
        error.add_note(", ".join(filter(None, (f"raised in the {name}", _layer(error) or PLACE.done))))


def _layer(error: Exception) -> str:
    """Name the layer that was running and what of it, from the layer inwards; empty where the traceback has no layer."""
    holders = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [holder for holder in holders if isinstance(holder, nn.Module)]
    numbers = [number for module in modules if isinstance(number := getattr(module, "layer_number", None), int)]
    if not numbers:
        return ""
    first = next(place for place, module in enumerate(modules) if getattr(module, "layer_number", None) == numbers[-1])
    return f"layer {numbers[-1]}: {', '.join(dict.fromkeys(type(module).__name__ for module in modules[first:]))}"
