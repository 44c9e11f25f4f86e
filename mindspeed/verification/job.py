"""The work of one rank for one run, as it travels to a worker of the pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mindspeed.verification.shape import Recipe


@dataclass(frozen=True, slots=True)
class Job:
    """Train ``recipe`` under a plan (its JSON form) as ``rank`` of ``world_size``, meeting the others at ``store``, a file."""

    plan: dict[str, Any]
    recipe: Recipe
    rank: int
    world_size: int
    store: str


@dataclass(frozen=True, slots=True)
class Failure:
    """A job that raised: one line, and the traceback."""

    message: str
    traceback: str
