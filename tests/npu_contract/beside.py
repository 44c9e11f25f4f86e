"""Kernels and bytes beside the calls of torch_npu that do the work, counted on CPU tensors."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.npu_contract.recording import OnNpu

_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_"}
_NO_KERNEL = _EMPTY | {"lift_fresh", "detach", "promote_types"}


@dataclass
class Beside:
    """Kernels and bytes of torch's own operators, ``direct`` the bytes that the calls of torch_npu read and write.

    ``names`` counts the kernels by operator, ``reads`` the reads of the host.
    """

    kernels: int = 0
    names: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    direct: int = 0
    reads: int = 0

    @property
    def share(self) -> float:
        """The bytes beside the direct calls, as a share of theirs."""
        return self.bytes / max(1, self.direct)


class CountBeside(OnNpu):
    """Runs operators as `OnNpu` does, and counts what runs beside the calls of torch_npu."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Beside()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = super().__torch_dispatch__(func, types, args, kwargs)
        name = func._schema.name.partition("::")[2]
        if func.namespace == "npu":
            self.found.direct += _bytes((args, kwargs, results))
        elif name in ("_local_scalar_dense", "equal"):
            self.found.reads += 1
        elif func.namespace == "aten" and name not in _NO_KERNEL and not func.is_view:
            self.found.kernels += 1
            self.found.names[name] += 1
            self.found.bytes += _bytes((args, kwargs, results))
        return results


def count(call: Callable[[], Any]) -> Beside:
    """Count what ``call`` runs."""
    with CountBeside() as mode:
        call()
    return mode.found


def _bytes(values: Any) -> int:
    """The bytes of the different tensors of a call, without masks; of one whose rows repeat, those in memory."""
    found = {}
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.dtype is not torch.bool:
            elements = 1
            for size, stride in zip(leaf.shape, leaf.stride(), strict=True):
                elements *= size if stride else 1
            found[leaf.data_ptr(), tuple(leaf.shape)] = elements * leaf.element_size()
    return sum(found.values())
