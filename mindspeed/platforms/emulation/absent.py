"""Storages whose contents are elsewhere: under poison an operator that reads one is refused."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mindspeed.plugins.fixes import advice
from mindspeed.plugins.problems import Problem, RunError

_absent: Final[dict[int, tuple[weakref.ref[UntypedStorage], str, str]]] = {}
_SHAPE_ALONE: Final = ("empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full")
"""Operators that look at the shape of a tensor and not at its contents, beside views."""


def mark(storages: Iterable[UntypedStorage], feature: str, module: str) -> None:
    """Note that storages of a module are away, by which feature."""
    _absent.update((storage._cdata, (weakref.ref(storage), feature, module)) for storage in storages)


def unmark(storages: Iterable[UntypedStorage]) -> None:
    """Note that storages have their contents again, or are about to be filled."""
    for storage in storages:
        _absent.pop(storage._cdata, None)


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


def read_while_absent(feature: str, module: str, operator: str) -> RunError:
    """Return the error of an operator that read what is away."""
    text = f"{feature}: {operator} read a tensor of {module} while its contents were away"
    fix = f"read a copy that is made in the forward pass, or remove {feature}"
    return RunError([Problem("MS617", text, (feature,), fix=advice(fix))])


def _require_present(tensor: Tensor, operator: str) -> None:
    storage = tensor.untyped_storage()
    if (found := _absent.get(storage._cdata)) is None:
        return
    reference, feature, module = found
    if reference() is storage:
        raise read_while_absent(feature, module, operator)
    del _absent[storage._cdata]  # that one is gone, and another has its address
