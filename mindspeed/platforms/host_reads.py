"""Reads of device tensors on the host: on an accelerator each of them waits until the device has computed everything so far.

A read is ``item``, ``tolist``, ``numpy``, a truth value, a copy to the host, or an operator whose result has a shape that
depends on values. What was copied to the host before is read for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mindspeed.platforms.call_site import call_site
from mindspeed.platforms.cpu_host import is_host, mark_host, read_listeners, report_read

_aten: Final = torch.ops.aten
_VALUE: Final = {_aten._local_scalar_dense.default: "item"}
_SHAPE: Final = (_aten.nonzero, _aten.masked_select, _aten._unique2, _aten.unique_dim, _aten.unique_consecutive, _aten.bincount)
_LISTS: Final = ("tolist", "numpy")
_KERNELS: Final = str(Path(__file__).parents[1] / "ops")


@dataclass(frozen=True, slots=True)
class HostRead:
    """A read: the operation, and file, line and function of its caller."""

    operation: str
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.operation} at {self.file}:{self.line} in {self.function}"


@contextmanager
def host_reads() -> Iterator[list[HostRead]]:
    """Record the reads of this thread while the block runs, in backward too. Needs an active cpu-platform plan."""
    reads: list[HostRead] = []

    def note(operation: str, tensor: torch.Tensor) -> None:
        """Note a read, but not that of an operator's kernel, which runs on the device of an accelerator."""
        read = HostRead(operation, *call_site()[:3])
        if not read.file.startswith(_KERNELS):
            reads.append(read)

    read_listeners.append(note)
    try:
        with _Operators(), _lists_seen():  # type: ignore[no-untyped-call]
            yield reads
    finally:
        read_listeners.remove(note)


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the operators whose result, or its shape, is a value. What is computed from host tensors alone is on the host."""

    only_watches = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        packet = func.overloadpacket
        if func in _VALUE:
            report_read(_VALUE[func], args[0])
        elif packet in _SHAPE or (packet is _aten.repeat_interleave and given.get("output_size") is None):
            report_read(packet.__name__, args[0])
        elif packet in (_aten.index, _aten.index_put, _aten.index_put_):
            masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
            if masks:
                report_read(f"{packet.__name__} by a mask", masks[0])
        result = func(*args, **given)
        tensors = [leaf for leaf in tree_leaves((args, given)) if isinstance(leaf, torch.Tensor)]
        if tensors and all(map(is_host, tensors)):
            for made in (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)):
                mark_host(made)
        return result


@contextmanager
def _lists_seen() -> Iterator[None]:
    """See the methods that give values without an operator."""

    def seen(name: str) -> Callable[..., Any]:
        original: Callable[..., Any] = getattr(torch.Tensor, name)

        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            report_read(name, self)
            return original(self, *args, **kwargs)

        return read

    for name in _LISTS:
        setattr(torch.Tensor, name, seen(name))
    try:
        yield
    finally:
        for name in _LISTS:
            delattr(torch.Tensor, name)  # it is the method of the base class again
