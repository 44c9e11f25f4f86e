"""Storages whose contents are elsewhere: under poison an operator that reads one is refused."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mindspeed.memory.parked import LayerPart, Parked, Source, read_while_away
from mindspeed.plugins.patches import Function, wrapper

_POISON: Final = 0xFF
"""Every byte of a poisoned storage: NaN in each floating-point type, -1 in each signed integer."""
_absent: Final[dict[int, tuple[weakref.ref[UntypedStorage], LayerPart]]] = {}
_SHAPE_ALONE: Final = ("empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full")
"""Operators that look at the shape of a tensor and not at its contents, beside views."""


def fill_with_poison(parked: Parked) -> None:
    """Replace ``Parked.free``: keep the storages, fill them with poison and note whose they are."""
    for storage in parked.storages:
        storage.fill_(_POISON)  # type: ignore[attr-defined]
        _absent[storage._cdata] = (weakref.ref(storage), parked.part)


@wrapper
def present_again(give: Function, parked: Parked, source: Source) -> None:
    """``Parked.give``: what fills the storages may touch them, and so may everybody after it."""
    for storage in parked.storages:
        _absent.pop(storage._cdata, None)
    give(parked, source)


@contextmanager
def reads_refused() -> Iterator[None]:
    """Refuse reads of what is away, as long as the context is open."""
    with AbsenceGuard():  # type: ignore[no-untyped-call]
        yield


class AbsenceGuard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raise RunError with MS617 where an operator reads a storage that is away."""

    only_watches = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if _absent and not func.is_view and func._opname not in _SHAPE_ALONE:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                    _require_present(leaf, func._opname)
        return func(*args, **(kwargs or {}))


def _require_present(tensor: Tensor, operator: str) -> None:
    storage = tensor.untyped_storage()
    if (found := _absent.get(storage._cdata)) is None:
        return
    reference, part = found
    if reference() is storage:
        raise read_while_away(part, operator)
    del _absent[storage._cdata]  # that one is gone, and another has its address
