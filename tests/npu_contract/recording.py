"""Runs of operators as an NPU would run them, with every call of torch_npu written down."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from mindspeed.ops.errors import OperatorError
from mindspeed.ops.registration import Kernel, operators, with_reference

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Called:
    """An operator of torch_npu, with its arguments by the names of its schema."""

    phase: str
    operator: str
    arguments: dict[str, Any]


@dataclass
class Record:
    """What happened: calls of torch_npu, and schemas of ours with what they gave."""

    called: list[Called] = field(default_factory=list)
    ours: list[tuple[str, list[Any], list[Any]]] = field(default_factory=list)
    """Per schema of ours the results of the kernel and of the shape kernel, as (shape, type, contiguous)."""
    differentiable: bool = False
    """Whether a gradient came out."""

    def operators(self, phase: str) -> tuple[str, ...]:
        return tuple(call.operator for call in self.called if call.phase == phase)

    def schemas(self) -> set[str]:
        return {name for name, _, _ in self.ours}


def described(results: Any) -> list[Any]:
    tensors = [t for t in tree_flatten(results)[0] if isinstance(t, Tensor)]
    return [(tuple(t.shape), t.dtype, t.is_contiguous()) for t in tensors]


class OnNpu(TorchDispatchMode):
    """Sends operators of ours to the kernels registered for NPU, whatever the device of the tensors.

    ``kernels`` replaces some of them; ``shapes`` compares every result with the shape kernel of the schema, which takes fake
    tensors.
    """

    def __init__(self, kernels: dict[str, Kernel] | None = None, shapes: bool = False) -> None:
        super().__init__()
        self.record, self.phase = Record(), FORWARD
        self._kernels, self._shapes = kernels or {}, shapes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "npu":
            names = [argument.name for argument in func._schema.arguments]
            named = dict(zip(names, args, strict=False)) | kwargs
            self.record.called.append(Called(self.phase, func._schema.name.removeprefix("npu::"), named))
        if self._shapes and func is torch.ops.aten.item.default and args[0].device.type == "cpu":
            return 0  # a number of the host, which a fake tensor does not have; one of the NPU is an error
        if func.namespace != "mindspeed":
            return func(*args, **kwargs)
        name = func._schema.name.removeprefix("mindspeed::")
        kernel = self._kernels.get(name)
        with self, torch._C._AutoDispatchBelowAutograd():
            if kernel is not None:
                results = with_reference(kernel, operators()[name])(*args, **kwargs)
            else:
                results = func._op_dk(torch._C.DispatchKey.PrivateUse1, *args, **kwargs)
        expected = described(func(*args, **kwargs)) if self._shapes else []
        self.record.ours.append((name, described(results), expected))
        return results


class OnReference(TorchDispatchMode):
    """Sends operators of ours to their references."""

    def __init__(self) -> None:
        super().__init__()
        self.record, self.phase = Record(), FORWARD

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "mindspeed":
            return func(*args, **(kwargs or {}))
        with self, torch._C._AutoDispatchBelowAutograd():
            return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **(kwargs or {}))


def forward_and_backward(
    call: Callable[[], Any], leaves: list[Tensor], cotangent: Callable[[Tensor], Tensor], mode: Any
) -> Any:
    """Results, and gradients of the leaves where the operator has one."""
    with mode:
        results = [t for t in tree_flatten(call())[0] if isinstance(t, Tensor)]
        differentiable = [t for t in results if t.requires_grad]
        if not (differentiable and leaves):
            return results, []
        mode.phase = BACKWARD
        try:
            grads = torch.autograd.grad(differentiable, leaves, [cotangent(t) for t in differentiable])
        except OperatorError:  # forward only, by its own word
            return results, []
        mode.record.differentiable = True
    return results, list(grads)
