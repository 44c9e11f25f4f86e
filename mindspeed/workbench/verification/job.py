"""The work of one rank as it is sent over the broker to a worker of the pool, and its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mindspeed.problems import Problem


@dataclass(frozen=True, slots=True)
class WorkerCall:
    """Call the function ``name`` of a source file as one rank of a gloo job that meets at ``store``, a file.

    ``plan``, when there is one, is active then, in its JSON form. Arguments and result travel as pickles of their own:
    pickled by the connection, tensors would be shared memory. With ``alone`` the other ranks of the group are not there, and
    collectives leave their outputs as they are.
    """

    file: str
    name: str
    arguments: bytes
    rank: int
    world_size: int
    store: str
    plan: dict[str, Any] | None
    alone: bool = False

    @property
    def forkable(self) -> bool:
        """Return whether a process that has imported torch and Megatron on the cpu platform can be forked for it."""
        return self.plan is None or bool(self.plan["environment"]["platform"] == "cpu")


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one rank: its pickled result or problem, the CPU seconds that it took, and the number of threads after
    it.

    ``leftover`` describes threads or dispatch modes that the job should have ended; empty when there are none.
    """

    outcome: bytes | Problem
    cpu_seconds: float
    threads: int
    leftover: str
