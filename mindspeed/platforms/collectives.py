"""Collectives seen from outside: which tensors go in and out, and how many bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any, Final, TypeVar

import torch

from mindspeed.plugins.patches import Function, wrapper

_INPUTS: Final = ("tensor", "input", "input_tensor", "input_list", "input_tensor_list", "scatter_list")
_OUTPUTS: Final = ("output", "output_tensor", "output_tensor_list", "tensor_list", "gather_list")
_TENSOR_IS_RESULT: Final = ("broadcast", "all_reduce", "reduce", "scatter", "recv", "irecv")
MESSAGES: Final = ("send", "recv", "isend", "irecv")
"""Kinds of calls with one other rank."""
_NAMES: Final = {
    "_all_gather_base": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "isend": "send",
    "irecv": "recv",
}
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """Describe a call of a collective: its kind, its arguments by name, the tensors that go in and those that come out."""

    kind: str
    arguments: dict[str, Any]
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]

    @property
    def size(self) -> int:
        """Payload in bytes: what this rank hands in or takes out, whichever is more; 0 in a group of one rank."""
        if torch.distributed.get_world_size(self.arguments.get("group")) == 1:
            return 0
        return max(sum(t.numel() * t.element_size() for t in side) for side in (self.inputs, self.outputs))

    @property
    def process_group(self) -> Any:
        """The process group, that of all ranks if none was given."""
        return self.arguments.get("group") or torch.distributed.GroupMember.WORLD

    @property
    def group(self) -> str:
        """Description of the process group, as Megatron names it, else its name."""
        group = self.arguments.get("group")
        if group is None:
            return "default"
        return getattr(group, "group_desc", "") or str(group.group_name)

    @property
    def asynchronous(self) -> bool:
        """Return whether a handle is returned before the tensors are ready."""
        return bool(self.arguments.get("async_op")) or self.kind in ("isend", "irecv")


def read_call(collective: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CollectiveCall:
    """Describe ``collective(*args, **kwargs)``."""
    kind, arguments = collective.__name__, signature(collective).bind(*args, **kwargs).arguments
    inputs = _tensors(arguments, _INPUTS)
    outputs = _tensors(arguments, _OUTPUTS)
    if kind in _TENSOR_IS_RESULT:
        outputs = (arguments["tensor"],)
    if kind in ("recv", "irecv", "scatter"):
        inputs = _tensors(arguments, ("scatter_list",))
    return CollectiveCall(kind, arguments, inputs, outputs)


def _tensors(arguments: dict[str, Any], names: tuple[str, ...]) -> tuple[torch.Tensor, ...]:
    values = [arguments[name] for name in names if arguments.get(name) is not None]
    return tuple(tensor for value in values for tensor in ([value] if isinstance(value, torch.Tensor) else value))


@contextmanager
def coalesced(
    manager: AbstractContextManager[Any], collected: list[list[Item]], hand: Callable[[list[Any], list[Item]], list[Any]]
) -> Iterator[Any]:
    """Run ``_coalescing_manager``, whose collectives are launched together at its end.

    Wrappers of collectives append to the last list of ``collected`` meanwhile; ``hand`` makes the handles from those of the
    backend and from what was appended, if anything was.
    """
    items: list[Item] = []
    with manager as group:
        collected.append(items)
        try:
            yield group
        finally:
            collected.pop()
    if items:
        group.works = hand(group.works, items)


@dataclass(slots=True)
class Count:
    """Number of calls and sum of their payloads in bytes (see `CollectiveCall.size`)."""

    calls: int = 0
    bytes: int = 0


class CollectiveTraffic(dict[tuple[str, str], Count]):
    """``{(kind, group): Count}``; kinds are those of torch.distributed without their spellings, as all_gather."""

    def total(self, kind: str) -> Count:
        """Calls and bytes of one kind over all groups."""
        counts = [count for (name, _), count in self.items() if name == kind]
        return Count(sum(c.calls for c in counts), sum(c.bytes for c in counts))

    def add(self, call: CollectiveCall) -> None:
        count = self.setdefault((_NAMES.get(call.kind, call.kind), call.group), Count())
        count.calls += 1
        count.bytes += call.size


_listeners: list[CollectiveTraffic] = []


@contextmanager
def traffic() -> Iterator[CollectiveTraffic]:
    """Count the collectives of this process while the block runs, if the active plan wraps them by `counted`."""
    counted = CollectiveTraffic()
    _listeners.append(counted)
    try:
        yield counted
    finally:
        # by identity: equal counts of nested blocks are different listeners
        _listeners[:] = [listener for listener in _listeners if listener is not counted]


@wrapper
def counted(collective: Function, *args: Any, **kwargs: Any) -> Any:
    """Tell every open `traffic` block what a collective moves."""
    if _listeners:
        call = read_call(collective, args, kwargs)
        for listener in _listeners:
            listener.add(call)
    return collective(*args, **kwargs)
