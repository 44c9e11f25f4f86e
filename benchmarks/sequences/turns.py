"""Seconds that a rank computes between its waits, while all ranks of the machine take turns."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch.distributed as dist

from mindspeed.ops.process_groups import PendingCollective

WAITS: Final[tuple[tuple[Any, str], ...]] = (
    (PendingCollective, "wait"),
    (dist, "all_gather_into_tensor"),
    (dist, "reduce_scatter_tensor"),
)
"""Where attention waits for other ranks."""


@dataclass(frozen=True)
class Sample:
    """One forward and backward pass: ``segments`` between waits, ranks taking turns, and ``wall`` with all ranks at once."""

    segments: tuple[float, ...]
    wall: float = inf


@contextmanager
def turns(token: Path) -> Iterator[list[float]]:
    """Lets one process at a time compute: the one that holds the lock on the file ``token``, given away at every wait.

    The list gets the seconds from the beginning to the first wait, from each wait to the next, and from the last to the end.
    """
    spent: list[float] = []
    begin = 0.0
    with token.open("w") as file, ExitStack() as stack:

        def take() -> None:
            nonlocal begin
            fcntl.flock(file, fcntl.LOCK_EX)
            begin = time.perf_counter()

        def give() -> None:
            spent.append(time.perf_counter() - begin)
            fcntl.flock(file, fcntl.LOCK_UN)

        def in_between(wait: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                give()
                try:
                    return wait(*args, **kwargs)
                finally:
                    take()

            return call

        for owner, name in WAITS:
            stack.enter_context(patch.object(owner, name, in_between(getattr(owner, name))))
        take()
        try:
            yield spent
        finally:
            give()
