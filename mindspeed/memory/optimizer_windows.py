"""Megatron's optimizers in windows: stepped a part at a time, and whole for checkpoints.

`manage` registers an optimizer; the wrappers stand before the methods that read or write main weights and states
(`mindspeed.memory.patches`). Several features may register one optimizer and wrap a method: the outermost wrapper acts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mindspeed.memory.byte_count import Bytes
from mindspeed.memory.windows import MainWeight, OptimizerWindow, Use, divide, step
from mindspeed.plugins.patches import Function, wrapper

Around = Callable[[OptimizerWindow], AbstractContextManager[Any]]

_SHARDS: Final = (
    ("shard_float16_groups", "shard_fp32_from_float16_groups"),  # the distributed optimizer
    ("float16_groups", "fp32_from_float16_groups"),
)
"""Attributes of the mixed-precision optimizers with weights of the model, and with their main weights."""


@dataclass(slots=True)
class Managed:
    """The windows of one optimizer, and the contexts around them, the outermost first. ``use`` is what they are open for."""

    weights: tuple[MainWeight, ...]
    parts: int = 1
    contexts: list[Around] = field(default_factory=list)
    use: Use | None = None

    def add(self, parts: int, around: Around, owner: str) -> None:
        """Step in at least ``parts`` windows, and put a context around the existing ones, which begins now."""
        self.parts = max(self.parts, parts)
        self.contexts.insert(0, around)
        for weight in self.weights:
            weight.owner = owner
        with self.whole("load"):
            pass

    @contextmanager
    def around(self, window: OptimizerWindow) -> Iterator[None]:
        with ExitStack() as stack:
            for context in self.contexts:
                stack.enter_context(context(window))
            yield

    @contextmanager
    def whole(self, use: Use) -> Iterator[None]:
        """Give a checkpoint all main weights and states."""
        self.use = use
        try:
            with torch.no_grad(), self.around(OptimizerWindow(self.weights, use)):
                yield
        finally:
            self.use = None


_managed: Final[WeakKeyDictionary[Any, Managed]] = WeakKeyDictionary()


def managed_by(optimizer: Any) -> Managed | None:
    """Return what is registered for one of Megatron's optimizers."""
    return _managed.get(optimizer)


def members(optimizer: Any) -> list[Any]:
    """The optimizers of a chained one that have parameters."""
    every = getattr(optimizer, "chained_optimizers", [optimizer])
    return [member for member in every if not getattr(member, "is_stub_optimizer", False)]


def main_weights(optimizer: Any) -> tuple[MainWeight, ...]:
    """The parameters of the inner optimizer of one of Megatron's, with the weights of each."""
    weights: dict[int, Tensor] = {}
    for model, main in _SHARDS:
        pairs = zip(getattr(optimizer, model, ()), getattr(optimizer, main, ()), strict=True)
        weights |= {id(fp32): weight for group in pairs for weight, fp32 in zip(*group, strict=True)}
    inner = optimizer.optimizer
    return tuple(
        MainWeight(parameter, weights.get(id(parameter)), index, inner)
        for index, group in enumerate(inner.param_groups)
        for parameter in group["params"]
    )


def resting_bytes(optimizer: Any) -> Bytes:
    """Return the bytes of main weights or their replacement, and of states, on the device and in host memory."""
    total = Bytes()
    for member in members(optimizer):
        managed = managed_by(member)
        for weight in managed.weights if managed else main_weights(member):
            held = [weight.residual, weight.ties, weight.copy, *weight.moments.values()]
            for tensor in held if weight.weight is None else [weight.main, *held]:
                if tensor is not None:
                    size = tensor.untyped_storage().nbytes()
                    total += Bytes(device=size) if tensor.is_cuda else Bytes(host=size)
    return total


def whole_tensors(optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and a copy of each main weight and each state, as a checkpoint gets them."""
    for number, member in enumerate(members(optimizer)):
        managed = managed_by(member)
        with managed.whole("save") if managed else nullcontext():
            for index, weight in enumerate(managed.weights if managed else main_weights(member)):
                tensors = {"main weight": weight.main} if weight.weight is not None else {}
                for name, tensor in (tensors | weight.moments).items():
                    yield f"{name} {index} of optimizer {number}", tensor.detach().clone()


def manage(optimizer: Any, parts: int, around: Around, owner: str = "") -> None:
    """Step an optimizer in at least so many windows, each in the context ``around(window)``, which begins now.

    The context that is registered last is the outermost. ``owner`` is the feature that is named in messages.
    """
    for member in members(optimizer):
        managed = _managed.setdefault(member, Managed(main_weights(member)))
        managed.add(parts, around, owner)


@wrapper
def step_with_ready_grads(original: Function, self: Any) -> Any:
    """Wrap ``step_with_ready_grads()``: the inner optimizer steps window by window."""
    managed = _managed.get(self)
    if managed is None or managed.use:
        return original(self)
    inner, windows = self.optimizer, divide(managed.weights, managed.parts)
    self.optimizer = SimpleNamespace(step=lambda: step(inner, windows, managed.around))
    managed.use = "step"
    try:
        return original(self)
    finally:
        self.optimizer, managed.use = inner, None


@wrapper
def copy_main_to_model(original: Function, self: Any) -> Any:
    """Wrap ``_copy_main_params_to_model_params()``: each window has copied its weights."""
    managed = _managed.get(self)
    if managed is not None and managed.use == "step":
        return None
    return saved(original)(self)


@wrapper
def saved(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap a method that reads main weights and states, or returns them."""
    return _whole("save", original, self, *args, **kwargs)


@wrapper
def loaded(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap a method that writes main weights or states."""
    return _whole("load", original, self, *args, **kwargs)


@wrapper
def sharded(original: Function, self: Any, model: Any = None, is_loading: bool = False, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``sharded_state_dict(model_sharded_state_dict, is_loading, ...)``, which makes missing states when it loads."""
    return _whole("load" if is_loading else "save", original, self, {} if model is None else model, is_loading, *args, **kwargs)


@wrapper
def norm_of_weights(original: Function, *args: Any, **kwargs: Any) -> Any:
    """Wrap Megatron-LM's ``calc_params_l2_norm(model, ...)``, which reads the main weights of every parameter."""
    with ExitStack() as stack:
        for managed in _managed.values():
            stack.enter_context(managed.whole("save"))
            for member in managed.weights:
                if member.weight is not None:
                    member.main.data = member.main.data.to(member.weight.device)
        return original(*args, **kwargs)


def _whole(use: Use, original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    managed = _managed.get(self)
    if managed is None or managed.use:
        return original(self, *args, **kwargs)
    with managed.whole(use):
        result = original(self, *args, **kwargs)
        return _kept(result, {id(weight.main) for weight in managed.weights if weight.is_parked})


def _kept(value: Any, mains: set[int]) -> Any:
    """Return what a checkpoint keeps, with aliases in place of main weights, whose memory is about to be taken from them."""
    if isinstance(value, Tensor):
        return value.detach() if id(value) in mains else value
    if type(value) is dict:
        return {name: _kept(member, mains) for name, member in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_kept(member, mains) for member in value)
    if (data := getattr(value, "data", None)) is not None and hasattr(value, "key"):  # ShardedTensor and its like
        value.data = _kept(data, mains)
    return value
