"""A log of asynchronous collectives: launched, waited for, first used. One JSON object per line and event.

``launch`` has id, kind, group and bytes; ``wait`` has id and the seconds it blocked; ``use`` has id, the operator
and whether the wait came before it. All have ``t``, seconds on one clock of this process. A use with
``"waited": false`` is a missing wait; little time between launch and wait, or a long block, is lost overlap.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from itertools import count
from typing import IO, Any

import torch
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from mindspeed.platforms.collectives import Call, Reader

PATH: str | None = None
"""File of the log, with ``{rank}`` for the rank, which is appended where the name lacks it. Set by the plan."""

_ids = count()
_files: dict[str, IO[str]] = {}
_coalesced: list[list[Call]] = []


@dataclass(slots=True, eq=False)
class Watched:
    """An output whose first use was not seen yet; ``start`` and ``end`` are byte addresses."""

    work: LoggedWork
    start: int
    end: int


_watched: list[Watched] = []


class LoggedWork:
    """Handle of a collective that writes when it is waited for. ``outputs`` are the tensors whose use is watched."""

    def __init__(self, work: Any, calls: list[Call]) -> None:
        self._work = work
        self.id = next(_ids)
        self.waited = False
        for call in calls:
            _write(event="launch", id=self.id, kind=call.kind, group=call.group, bytes=call.size)
        self.outputs = tuple(output for call in calls for output in call.outputs)

    @property
    def outputs(self) -> tuple[torch.Tensor, ...]:
        return self._outputs

    @outputs.setter
    def outputs(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self._outputs = tensors
        _watched[:] = [w for w in _watched if w.work is not self]
        _watched.extend(Watched(self, *_range(tensor)) for tensor in tensors if tensor.numel())

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        before = time.perf_counter()
        result = self._work.wait(*args, **kwargs)
        if not self.waited:
            self.waited = True
            _write(event="wait", id=self.id, blocked=time.perf_counter() - before)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class UseMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator of its thread and reports the first that touches a watched output."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _watched and not func.is_view:
            touched = [_range(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.numel()]
            for watched in [w for w in _watched if any(start < w.end and w.start < end for start, end in touched)]:
                if watched in _watched:
                    _write(event="use", id=watched.work.id, op=str(func), waited=watched.work.waited)
                    _watched[:] = [w for w in _watched if w.work is not watched.work]
        return func(*args, **(kwargs or {}))


_mode = UseMode()  # type: ignore[no-untyped-call]


def logged(collective: Callable[..., Any]) -> Callable[..., Any]:
    """A collective whose asynchronous calls are logged."""
    reader = Reader(collective)

    @wraps(collective)
    def launch(*args: Any, **kwargs: Any) -> Any:
        work = collective(*args, **kwargs)
        if isinstance(work, distributed_c10d._IllegalWork):
            _coalesced[-1].append(reader.read(args, kwargs))
        elif work is not None:
            call = reader.read(args, kwargs)
            if call.asynchronous:
                start_watching()
                return LoggedWork(work, [call])
        return work

    return launch


def logged_group(manager: Callable[..., Any]) -> Callable[..., Any]:
    """``_coalescing_manager``: its calls are launched together, at its end."""

    @wraps(manager)
    @contextmanager
    def grouped(*args: Any, **kwargs: Any) -> Iterator[Any]:
        calls: list[Call] = []
        with manager(*args, **kwargs) as group:
            _coalesced.append(calls)
            try:
                yield group
            finally:
                _coalesced.pop()
        if group.works and calls:
            start_watching()
            group.works = [LoggedWork(work, calls) for work in group.works]

    return grouped


def watching(init_process_group: Callable[..., None]) -> Callable[..., None]:
    """``init_process_group``: a thread's first groups are made before any graph, so backward passes are watched too."""

    @wraps(init_process_group)
    def created(*args: Any, **kwargs: Any) -> None:
        init_process_group(*args, **kwargs)
        start_watching()

    return created


def start_watching() -> None:
    """Watch the operators of this thread from now on."""
    if _mode not in _get_current_dispatch_mode_stack():
        _mode.__enter__()  # type: ignore[no-untyped-call]


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """Byte addresses from the first to behind the last element; (0, 0) for a tensor without storage."""
    try:
        start = tensor.data_ptr()
    except RuntimeError:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _write(**row: Any) -> None:
    if PATH is None:
        return
    rank = distributed_c10d.get_rank()
    path = PATH.replace("{rank}", str(rank)) if "{rank}" in PATH else f"{PATH}.{rank}"
    if path not in _files:
        _files[path] = open(path, "w", encoding="utf-8", buffering=1)  # noqa: SIM115 - open as long as the process
    _files[path].write(json.dumps({**row, "t": time.perf_counter()}) + "\n")
