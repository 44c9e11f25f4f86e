"""The work of one rank, a training run or a function to call, as it travels to a worker of the pool."""

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
class Call:
    """Call the function ``name`` of a source file as one rank of a gloo job; the plan, when there is one, is active then.

    Arguments and result travel as pickles of their own: pickled by the connection, tensors would be shared memory.
    """

    file: str
    name: str
    arguments: bytes
    rank: int
    world_size: int
    store: str
    plan: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A job that raised: one line, and the traceback."""

    message: str
    traceback: str
