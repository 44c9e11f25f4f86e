"""A log of asynchronous collectives and transfers: launched, waited for, first used. One JSON object per line and event.

``launch`` has id, kind, group and bytes; ``wait`` has id and the seconds it blocked; ``use`` has id, the operator
and whether the wait came before it. All have ``t``, seconds on one clock of this process. A use with
``"waited": false`` is a missing wait; little time between launch and wait, or a long block, is lost overlap.

With `WHOLE_STEPS` the log is the program of a rank, from which `mindspeed.workbench.exposure` simulates exposed time: it has
the start of each ``step``, matrix products (``kernel`` with op and flops), synchronous collectives too, each ``communicator``
with its ranks, and the other rank of a message (``peer``). The messages of a batch are launched with one id.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import IO, Any

import torch
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from mindspeed.platforms.collectives import MESSAGES, CollectiveCall, coalesced, read_call
from mindspeed.plugins.patches import Function, wrapper

PATH: str | None = None
"""File of the log, with ``{rank}`` for the rank, which is appended where the name lacks it. Set by the plan."""

WHOLE_STEPS: bool = False
"""True where the plan logs whole steps."""

_ids = count()
_communicators: set[tuple[str, str]] = set()
_files: dict[str, IO[str]] = {}
_coalesced: list[list[CollectiveCall]] = []


@dataclass(slots=True, eq=False)
class Watched:
    """An output whose first use was not seen yet; ``start`` and ``end`` are byte addresses."""

    work: LoggedWork
    start: int
    end: int


_watched: list[Watched] = []


class LoggedWork:
    """Handle of collectives or a transfer that writes when they are launched and waited for."""

    def __init__(self, work: Any, launches: Iterable[Mapping[str, Any]]) -> None:
        """``launches`` have the kind, the group and the bytes of each call."""
        self._work = work
        self.id = next(_ids)
        self.waited = False
        for launch in launches:
            _write(event="launch", id=self.id, **launch)

    def watch(self, outputs: Iterable[torch.Tensor]) -> None:
        """Report the first use of these tensors, and of no others."""
        _watched[:] = [watched for watched in _watched if watched.work is not self]
        _watched.extend(Watched(self, *_range(output)) for output in outputs if output.numel())

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

    only_watches = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _watched and not func.is_view:
            touched = [_range(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.numel()]
            for watched in [w for w in _watched if any(start < w.end and w.start < end for start, end in touched)]:
                if watched in _watched:
                    _write(event="use", id=watched.work.id, op=str(func), waited=watched.work.waited)
                    _watched[:] = [w for w in _watched if w.work is not watched.work]
        return func(*args, **(kwargs or {}))


_mode = UseMode()  # type: ignore[no-untyped-call]


@wrapper
def logged(collective: Function, *args: Any, **kwargs: Any) -> Any:
    """Log the asynchronous calls of a collective."""
    work = collective(*args, **kwargs)
    if isinstance(work, distributed_c10d._IllegalWork):
        _coalesced[-1].append(read_call(collective, args, kwargs))
    elif work is not None and (call := read_call(collective, args, kwargs)).asynchronous:
        return _logged_work(work, [call])
    elif WHOLE_STEPS and not (call := read_call(collective, args, kwargs)).asynchronous and _is_member(call):
        LoggedWork(_Done, [_launch(call)]).wait()
    return work


@wrapper
def logged_batch(batch_isend_irecv: Function, p2p_op_list: Sequence[Any]) -> list[Any]:
    """``batch_isend_irecv``: one operation on its communicator."""
    with _silent():
        works = list(batch_isend_irecv(p2p_op_list))
    calls = [
        CollectiveCall(op.op.__name__, {"tensor": op.tensor, "group": op.group, "peer": op.peer}, (op.tensor,), (op.tensor,))
        for op in p2p_op_list
    ]
    return [LoggedWork(_All(works), map(_launch, calls))] if calls else works


class _Done:
    """Handle of what is complete."""

    @staticmethod
    def wait() -> None:
        """Return."""


class _All:
    """Handle of several works."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self, *args: Any, **kwargs: Any) -> None:
        for work in self._works:
            work.wait(*args, **kwargs)


@contextmanager
def _silent() -> Iterator[None]:
    """Log nothing meanwhile."""
    global PATH
    before, PATH = PATH, None
    try:
        yield
    finally:
        PATH = before


@wrapper
def logged_step(forward_backward: Function, *args: Any, **kwargs: Any) -> Any:
    """Run the forward and backward passes of a step: its start and its products are rows of the log."""
    with whole_step():
        return forward_backward(*args, **kwargs)


@contextmanager
def whole_step() -> Iterator[None]:
    """Log the start of a step, and its products."""
    _write(event="step")
    with ProductLog():  # type: ignore[no-untyped-call]  # above the modes of a dry run, whose tensors have shapes only
        yield


class ProductLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Logs operators whose floating-point operations torch's counter knows: products and attention."""

    only_watches = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            flops = int(count(*args, **(kwargs or {}), out_val=out))
            _write(event="kernel", op=str(func).removesuffix(".default"), flops=flops)
        return out


@wrapper
def logged_group(manager: Function, *args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
    """``_coalescing_manager``: its calls are launched together, at its end."""
    return coalesced(manager(*args, **kwargs), _coalesced, lambda works, calls: [_logged_work(work, calls) for work in works])


@wrapper
def watching(init_process_group: Function, *args: Any, **kwargs: Any) -> None:
    """``init_process_group``: a thread's first groups are made before any graph, so backward passes are watched too."""
    init_process_group(*args, **kwargs)
    start_watching()


def _logged_work(work: Any, calls: list[CollectiveCall]) -> LoggedWork:
    start_watching()
    logged_work = LoggedWork(work, map(_launch, calls))
    logged_work.watch([output for call in calls for output in call.outputs])
    return logged_work


def _launch(call: CollectiveCall) -> dict[str, Any]:
    """Return the row of a call; write that of its communicator before."""
    row: dict[str, Any] = {"kind": call.kind, "group": call.group, "bytes": call.size}
    if not WHOLE_STEPS:
        return row
    name = str(call.process_group.group_name)
    if PATH is not None and (_file(PATH), name) not in _communicators:
        _communicators.add((_file(PATH), name))
        ranks = distributed_c10d.get_process_group_ranks(call.process_group)
        _write(event="communicator", communicator=name, group=call.group, ranks=ranks)
    peers = (call.arguments.get(name) for name in ("peer", "dst", "src") if call.kind in MESSAGES)
    return {**row, "communicator": name, "peer": next((peer for peer in peers if peer is not None), None)}


def _is_member(call: CollectiveCall) -> bool:
    return call.process_group is not distributed_c10d.GroupMember.NON_GROUP_MEMBER and bool(call.size)


def start_watching() -> None:
    """Watch the operators of this thread from now on."""
    if _mode not in _get_current_dispatch_mode_stack():
        _mode.__enter__()  # type: ignore[no-untyped-call]


def stop_watching() -> None:
    """Watch the operators of this thread no longer."""
    if _mode in _get_current_dispatch_mode_stack():
        _mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


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
    path = _file(PATH)
    if path not in _files:
        _files[path] = open(path, "w", encoding="utf-8", buffering=1)  # noqa: SIM115 - open as long as the process
    _files[path].write(json.dumps({**row, "t": time.perf_counter()}) + "\n")


def _file(path: str) -> str:
    """Return the file of this rank."""
    rank = distributed_c10d.get_rank() if distributed_c10d.is_initialized() else 0
    return path.replace("{rank}", str(rank)) if "{rank}" in path else f"{path}.{rank}"
