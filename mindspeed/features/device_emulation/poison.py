"""Poison: the output of an asynchronous collective is NaN, or the least integer, until it is waited for.

The collective runs on shadow buffers that are copied to the real outputs at the wait, so code that reads
too early computes with poison on every run, however fast the transport was.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import _disable_current_modes

from mindspeed.platforms.collectives import CollectiveCall, coalesced, read_call
from mindspeed.plugins.patches import Function, wrapper

_pending: dict[int, PoisonedWork] = {}
_coalesced: list[list[tuple[torch.Tensor, torch.Tensor]]] = []


class PoisonedWork:
    """Handle of a collective whose real outputs are poison until `wait`.

    ``work`` is the backend's handle, or several; ``pairs`` holds (shadow, real output).
    """

    def __init__(self, work: Sequence[Any], pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._work = work
        self._pairs = pairs
        _pending[id(self)] = self
        if work and hasattr(work[-1], "watch"):  # the log has seen the shadows
            work[-1].watch([output for _, output in pairs])

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        """Wait, then bring the outputs. Later calls change nothing."""
        waited = [work.wait(*args, **kwargs) for work in self._work]  # all of them, whatever one returns
        self._bring()
        return all(result is not False for result in waited)

    def _bring(self) -> None:
        with torch.no_grad(), _disable_current_modes():
            for shadow, output in self._pairs:
                output.data.copy_(shadow)
        self._pairs = []
        _pending.pop(id(self), None)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._work)

    def get_future(self) -> Any:
        """A future of the backend whose value appears after the outputs were brought."""

        def bring(future: Any) -> Any:
            self._bring()
            return future.value()

        return self._work[-1].get_future().then(bring)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work[-1], name)


@wrapper
def synchronized(synchronize: Function, *args: Any, **kwargs: Any) -> None:
    """``torch.cuda.synchronize``: end every collective in flight."""
    synchronize(*args, **kwargs)
    for work in list(_pending.values()):
        work.wait()


@wrapper
def poisoned(collective: Function, *args: Any, **kwargs: Any) -> Any:
    """Leave poison behind where a collective is asynchronous."""
    call = read_call(collective, args, kwargs)
    coalescing = bool(_coalesced) and call.process_group in distributed_c10d._world.pg_coalesce_state
    if not (call.outputs and (call.asynchronous or coalescing)):
        return collective(*args, **kwargs)
    shadows = {id(t): t.detach().clone(memory_format=torch.contiguous_format) for t in (*call.inputs, *call.outputs)}
    work = collective(**{name: _shadowed(value, shadows) for name, value in call.arguments.items()})
    pairs = [(shadows[id(output)], output) for output in call.outputs]
    _spoil(call)
    if coalescing:
        _coalesced[-1].extend(pairs)
        return work
    return None if work is None else PoisonedWork([work], pairs)  # None where this rank is not in the group


@wrapper
def poisoned_group(manager: Function, *args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
    """``_coalescing_manager``: the handle of the whole group completes the outputs of every call in it."""
    return coalesced(manager(*args, **kwargs), _coalesced, _one_handle)


def _one_handle(works: list[Any], pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> list[Any]:
    handle = PoisonedWork(list(works), pairs)
    if not works:
        handle.wait()
    return [handle] if works else []


def fill(tensor: torch.Tensor) -> None:
    """Fill with NaN, True, the least integer, or for unsigned integers the largest."""
    with torch.no_grad():
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            tensor.data.fill_(float("nan"))
        elif tensor.dtype is torch.bool:
            tensor.data.fill_(True)
        else:
            limits = torch.iinfo(tensor.dtype)
            tensor.data.fill_(limits.min or limits.max)


def _spoil(call: CollectiveCall) -> None:
    """Poison the outputs, but not what this rank may still read: the input of an all-gather or a broadcast's source."""
    kept = []
    if call.kind.lstrip("_").startswith("all_gather"):
        kept = [(tensor, tensor.detach().clone()) for tensor in call.inputs]
    if call.kind == "broadcast" and _is_source(call):
        return
    for output in call.outputs:
        fill(output)
    for tensor, value in kept:
        tensor.data.copy_(value)


def _is_source(call: CollectiveCall) -> bool:
    source = call.arguments.get("group_src")
    if source is not None:
        return bool(distributed_c10d.get_rank(call.process_group) == source)
    return bool(distributed_c10d.get_rank() == call.arguments.get("src"))


def _shadowed(value: Any, shadows: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return shadows.get(id(value), value)
    if isinstance(value, (list, tuple)):
        return [shadows.get(id(item), item) for item in value]
    return value
