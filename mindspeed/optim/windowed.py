"""A torch optimizer that is stepped in windows of its parameters, so that the rest of its memory may be elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from mindspeed.features.reuse_fp32_param.joined import joined
from mindspeed.features.swap_optimizer.swapped import Swapped
from mindspeed.memory.optimizer_windows import Around, Managed
from mindspeed.memory.windows import MainWeight, OptimizerWindow, divide, step
from mindspeed.ops.errors import refuse

_LOW: Final = (torch.bfloat16, torch.float16)


class _Windowed(Optimizer):
    """Steps the wrapped ``optimizer``, which sees one window of parameters at a time.

    Learning-rate schedulers and ``zero_grad`` use the wrapper like any optimizer: it shares the groups of the wrapped one. A
    parameter in bf16 or fp16 gets an fp32 main weight, which is updated and rounded to it.
    """

    optimizer: Optimizer
    _parameters: dict[MainWeight, Tensor]
    _managed: Managed

    def __init__(self, optimizer: Optimizer, parts: int, around: Around, owner: str) -> None:
        if parts < 1:
            refuse(f"{owner}: parts is {parts}", "pass parts=1 or more")
        self._wrapped = False
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._wrapped = True
        if isinstance(optimizer, _Windowed):
            self.optimizer, self._parameters, self._managed = optimizer.optimizer, optimizer._parameters, optimizer._managed
        else:
            self.optimizer, self._parameters = optimizer, _main_weights(optimizer)
            self._managed = Managed(tuple(self._parameters), contexts=[self._with_gradients])
        self.state = self.optimizer.state
        self._managed.add(parts, around, owner)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient, window by window; return what ``closure`` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        step(self.optimizer, divide(self._managed.weights, self._managed.parts), self._managed.around)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped optimizer, and under ``main_weights`` the fp32 weights of 16-bit parameters."""
        with self._managed.whole("save"), self._over_main_weights():
            mains = [None if member.weight is None else member.main.detach().clone() for member in self._managed.weights]
            return {**self.optimizer.state_dict(), "main_weights": mains}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` or the wrapped optimizer's returned; without main weights, those of the model are used."""
        mains = state_dict.get("main_weights", [None] * len(self._managed.weights))
        with self._managed.whole("load"), self._over_main_weights():
            self.optimizer.load_state_dict({name: value for name, value in state_dict.items() if name != "main_weights"})
            for member, main in zip(self._managed.weights, mains, strict=True):
                if member.weight is not None:
                    member.main.copy_(member.weight if main is None else main)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse further parameters; the constructor adds those of the wrapped optimizer."""
        if self._wrapped:
            refuse("a wrapped optimizer cannot get further parameters", "add them before the optimizer is wrapped")
        super().add_param_group(param_group)

    @contextmanager
    def _with_gradients(self, window: OptimizerWindow) -> Iterator[None]:
        """Give main weights the gradients of their parameters."""
        pairs = [(member, self._parameters[member]) for member in window.weights if window.use == "step"]
        apart = [(member, parameter) for member, parameter in pairs if member.main is not parameter]
        for member, parameter in apart:
            gradient = None if parameter.grad is None else _local(parameter.grad)
            member.main.grad = None if gradient is None else gradient.to(member.main.dtype)
        try:
            yield
        finally:
            for member, _ in apart:
                member.main.grad = None

    @contextmanager
    def _over_main_weights(self) -> Iterator[None]:
        """Let the groups of the wrapped optimizer have the main weights, to which its states belong."""
        given = [group["params"] for group in self.optimizer.param_groups]
        for index, group in enumerate(self.optimizer.param_groups):
            group["params"] = [member.main for member in self._managed.weights if member.group == index]
        try:
            yield
        finally:
            for group, parameters in zip(self.optimizer.param_groups, given, strict=True):
                group["params"] = parameters
            self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state


class SwapOptimizer(_Windowed):
    """Keeps the states of a torch optimizer, and the fp32 main weights of 16-bit parameters, in host memory.

    A step updates the parameters in about ``parts`` windows. The next window is prefetched and the one before offloaded during
    the update, so that at most three are on the device. The results are those of the wrapped optimizer bit for bit, if
    it updates each parameter by itself as Adam and SGD do. Parameters have any floating-point type. Under FSDP2, wrap
    after ``fully_shard``: states are those of this rank's shards. Raises OperatorError.
    """

    def __init__(self, optimizer: Optimizer, parts: int = 16) -> None:
        super().__init__(optimizer, parts, Swapped().around, "swap-optimizer")


class ReuseFp32Param(_Windowed):
    """Keeps a bf16 parameter and the 16 bits that rounding took from its fp32 main weight, instead of the main weight.

    Main weights exist for one of ``parts`` windows at a time: the parameter and its residual are joined, updated and split
    again, bit for bit as if fp32 weights were kept. Parameters of fp32 are updated as they are. Wraps an optimizer of bf16
    parameters; ``SwapOptimizer(ReuseFp32Param(...))`` offloads residuals and states as well. Raises OperatorError.
    """

    def __init__(self, optimizer: Optimizer, parts: int = 16) -> None:
        types = {parameter.dtype for group in optimizer.param_groups for parameter in group["params"]}
        if torch.bfloat16 not in types or torch.float16 in types:
            found = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in types))
            refuse(f"reuse-fp32-param: the parameters are {found}, but bf16 ones are needed", "convert the model to bf16")
        super().__init__(optimizer, parts, joined, "reuse-fp32-param")


def _main_weights(optimizer: Optimizer) -> dict[MainWeight, Tensor]:
    """Return the main weight of each parameter: itself, or a copy in fp32; of a distributed tensor its local one."""
    found: dict[MainWeight, Tensor] = {}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            local = _local(parameter)
            low = parameter.dtype in _LOW
            main = local.detach().float() if low else local
            found[MainWeight(main, local.detach() if low else None, index, optimizer)] = parameter
            if main is not parameter and parameter in optimizer.state:
                state = optimizer.state.pop(parameter).items()
                optimizer.state[main] = {name: _state_of(main, parameter, value) for name, value in state}
    return found


def _state_of(main: Tensor, parameter: Tensor, value: Any) -> Any:
    """Return a state of a parameter as that of its main weight."""
    is_moment = isinstance(value, Tensor) and value.shape == parameter.shape and value.is_floating_point()
    return _local(value).to(main.dtype) if is_moment else value


def _local(tensor: Any) -> Tensor:
    """Return the local part of a distributed tensor."""
    local: Tensor = tensor.to_local().detach() if hasattr(tensor, "to_local") else tensor
    return local
