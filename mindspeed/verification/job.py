"""The work of one rank, a training run or a function to call, as it travels to a worker of the pool, and its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mindspeed.plugins.problems import Problem
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


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of one rank: the result or Failure, the seconds of CPU that it took, and the number of threads after it.

    ``leftover`` describes threads that the job should have ended; empty when there are none.
    """

    outcome: Any
    cpu_seconds: float
    threads: int
    leftover: str


@dataclass(frozen=True, slots=True)
class Team:
    """A request to the broker: a pickled job for each rank.

    With ``warm`` the workers may be forked from a process that has imported torch and Megatron on the cpu platform.
    """

    jobs: tuple[bytes, ...]
    warm: bool


@dataclass(frozen=True, slots=True)
class Results:
    """The broker's answer: a pickled Answer for each rank in order, or the problem that ended the job."""

    answers: tuple[bytes, ...] = ()
    problem: Problem | None = None
