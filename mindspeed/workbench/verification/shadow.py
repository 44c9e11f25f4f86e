"""Judge the calls of operators in a job on the CPU by the kernels that an NPU and a GPU would run them with.

A kernel refuses a call by its own ``supports``, which reads shapes, types and options alone. So a small job shows which
kernels its calls would reach, without an accelerator.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any, Final
from unittest.mock import MagicMock, patch

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed.ops.fusion_attention import LANES, LANES_OF
from mindspeed.ops.registration import Kernel, operators
from mindspeed.ops.variants import python_variants
from mindspeed.workbench.verification import training
from mindspeed.workbench.verification.kernel_calls import DEVICES, Calls, KernelCalls
from mindspeed.workbench.verification.shape import Recipe

_TRITON: Final = ("triton", "triton.language", "triton.runtime", "triton.runtime.interpreter")


def judge(recipe: Recipe) -> Calls:
    """Train one rank as `mindspeed.workbench.verification.training.train` does, and return its calls of operators.

    Statistics of attention have the repetitions of an NPU; kernels of a GPU take any number.
    """
    with patch.dict(LANES_OF, cpu=LANES), ShadowMode() as mode:
        training.train(recipe)
    return dict(mode.calls)


class ShadowMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Ask the kernels of other devices about each call of an operator of mindspeed, and run it as it is."""

    only_watches = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: defaultdict[tuple[str, str], KernelCalls] = defaultdict(KernelCalls)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func.namespace == "mindspeed":
            operator = func._schema.name.partition("::")[2]
            file = operators()[operator].__module__.rpartition(".")[2]
            for device in DEVICES:
                kernel = kernels(device, file).get(operator)
                counted = self.calls[file, device]
                counted.total += 1
                if kernel is not None and (kernel.supports is None or kernel.supports(*args, **(kwargs or {}))):
                    counted.taken += 1
                else:
                    counted.refused.add(f"{operator}({', '.join(map(_described, args))})")
        return func(*args, **(kwargs or {}))


@cache
def kernels(device: str, file: str) -> Mapping[str, Kernel]:
    """Import the table of an operator's kernels for a device, on a machine that has neither the device nor Triton."""
    if file not in python_variants(device):
        return {}
    with _without_triton():
        table: Mapping[str, Kernel] = import_module(f"mindspeed.ops.{device}.{file}").KERNELS
    return table


@contextmanager
def _without_triton() -> Iterator[None]:
    """Import kernels of Triton as names alone; afterwards no module that was imported so is left."""
    with patch.dict(sys.modules):
        sys.modules.update({name: MagicMock(name=name) for name in _TRITON if name not in sys.modules})
        yield


def _described(value: Any) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if isinstance(value, Tensor) else repr(value)
