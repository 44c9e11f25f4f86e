"""An emulated link: a transfer is done some time after its launch, and a wait sleeps for what is left of that time.

A transfer takes `LATENCY` and its bytes by `BYTES_PER_SECOND`; those of one process group take place one after another. What
computes meanwhile hides it, as beside a real link, so lost overlap is seen and measured on one machine. Values do not change.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch.distributed import distributed_c10d

from mindspeed.platforms.collectives import CollectiveCall, coalesced, read_call
from mindspeed.plugins.patches import Function, wrapper

LATENCY: float = 0.0
"""Seconds of each transfer, whatever its size. Set by the plan."""
BYTES_PER_SECOND: float = float("inf")
"""Bytes that a rank sends in a second. Set by the plan."""

_free_at: dict[str, float] = {}
_coalesced: list[list[CollectiveCall]] = []


class DelayedWork:
    """Handle of transfers that are done at a time of `time.perf_counter`."""

    def __init__(self, work: Any, done_at: float) -> None:
        self._work = work
        self._done_at = done_at

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        result = self._work.wait(*args, **kwargs)
        _sleep_until(self._done_at)
        return result

    def is_completed(self) -> bool:
        return time.perf_counter() >= self._done_at and bool(self._work.is_completed())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@wrapper
def delayed(collective: Function, *args: Any, **kwargs: Any) -> Any:
    """Delay a collective: at its wait where it is asynchronous, else before it returns."""
    call, launched_at = read_call(collective, args, kwargs), time.perf_counter()
    work = collective(*args, **kwargs)
    if isinstance(work, distributed_c10d._IllegalWork):
        _coalesced[-1].append(call)
        return work
    if work is None and call.asynchronous:  # this rank is not in the group
        return None
    done_at = _reserve([call], launched_at)
    if work is not None:
        return DelayedWork(work, done_at)
    _sleep_until(done_at)
    return None


@wrapper
def delayed_group(manager: Function, *args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
    """``_coalescing_manager``: its transfers are launched together, at its end."""
    return coalesced(manager(*args, **kwargs), _coalesced, _delayed_works)


def _delayed_works(works: list[Any], calls: list[CollectiveCall]) -> list[Any]:
    done_at = _reserve(calls, time.perf_counter())
    return [DelayedWork(work, done_at) for work in works]


def sent_bytes(call: CollectiveCall) -> int:
    """Bytes that this rank sends, by an algorithm that sends no more than it must."""
    if not call.size:
        return 0
    ranks = distributed_c10d.get_world_size(call.arguments.get("group"))
    kind = call.kind.lstrip("_")
    if kind.startswith(("all_gather", "reduce_scatter", "all_to_all")):
        return call.size * (ranks - 1) // ranks
    return call.size * 2 * (ranks - 1) // ranks if kind == "all_reduce" else call.size


def _reserve(calls: Sequence[CollectiveCall], launched_at: float) -> float:
    """Take the link of each transfer's group for as long as the transfer takes; the time at which the last one is done."""
    done_at = launched_at
    for call in calls:
        if call.size:
            group = str(call.process_group.group_name)
            begins_at = max(launched_at, _free_at.get(group, 0.0))
            _free_at[group] = begins_at + LATENCY + sent_bytes(call) / BYTES_PER_SECOND
            done_at = max(done_at, _free_at[group])
    return done_at


def _sleep_until(moment: float) -> None:
    if (left := moment - time.perf_counter()) > 0:
        time.sleep(left)
