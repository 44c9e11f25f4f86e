"""Measure one rank of a job of any size in one process: tensors have shapes and storages but no contents.

Megatron builds and trains its own model under fake tensors, in a process group whose other ranks are not there. Integer tensors
are computed, for they decide shapes: the tokens of each expert, splits of an all-to-all, indices. Routers spread tokens evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import get_model_config
from torch import Tensor, UntypedStorage
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mindspeed.pipeline import megatron as schedules
from mindspeed.pipeline.megatron import Engine
from mindspeed.workbench.verification import training
from mindspeed.workbench.verification.shape import Recipe

_ATEN: Final = torch.ops.aten
LARGEST: Final = 2**24
"""Elements of an integer tensor that is computed; a larger one, such as the mask of a long sequence, has no contents."""


def measure(recipe: Recipe) -> tuple[int, int]:
    """Return what `mindspeed.workbench.verification.training.measure` does, without contents of tensors."""
    with fake_tensors():
        return training.measure(recipe)


@contextmanager
def fake_tensors(losses: Sequence[Any] = ()) -> Iterator[None]:
    """Make tensors without contents, and replace what reads them: conversions of modules, object collectives, routing.

    ``losses`` are those that a rank receives whose last stage is on another rank.
    """
    with (
        patch.object(Module, "_apply", _convert),
        patch.object(TopKRouter, "routing", _routed_evenly(TopKRouter.routing)),
        patch.object(dist, "all_gather_object", _gather_own),
        patch.object(P2PCommunicator, "_communicate", _of_one_shape(P2PCommunicator._communicate)),
        patch.object(Engine, "__call__", _of_one_shape(Engine.__call__)),
        patch.object(schedules, "moved", _own_data(losses)),
        patch.object(torch, "tensor", _stacked_scalars(torch.tensor)),
        patch.object(FakeTensor, "numpy", _zeros),
        patch.object(UntypedStorage, "copy_", _copied_contents(UntypedStorage.copy_)),
        FakeTensorMode(allow_non_fake_inputs=True),
        ComputedIntegers(),  # type: ignore[no-untyped-call]
    ):
        yield


class ComputedIntegers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Compute integer tensors with real values within a mode of fake tensors.

    Reads of fake ones return 0, and none of their elements differs from 0.
    """

    only_watches = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        computed = not any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if func.namespace == "c10d":
            return _collective(func, args, computed)
        if tensors and computed:
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is _ATEN._local_scalar_dense.default:
            return 0
        if func is _ATEN.masked_select.default and not isinstance(args[1], FakeTensor):
            return args[0].new_empty(_count(args[1], args[0].shape))
        if func is _ATEN.nonzero.default:
            return args[0].new_empty((0, args[0].dim()), dtype=torch.int64)
        made = func(*args, **kwargs)
        if tensors or not isinstance(made, Tensor) or made.is_floating_point() or made.numel() > LARGEST:
            return made
        if made.dtype is torch.uint8:  # bytes of other tensors
            return made
        with unset_fake_temporarily():
            return func(*args, **kwargs)


def _collective(func: Any, args: Sequence[Any], computed: bool) -> Any:
    """Answer a collective: every other rank has the integers that this one has."""
    with unset_fake_temporarily():
        if computed and func._opname in ("_allgather_base_", "alltoall_base_"):
            output, own = args[:2]
            output.view(-1).copy_(own.reshape(-1).repeat(-(-output.numel() // max(1, own.numel())))[: output.numel()])
        elif computed and func._opname == "allgather_":
            for outputs, own in zip(*args[:2], strict=True):
                for output in outputs:
                    output.copy_(own)
    work = FakeWork().boxed()
    return work if len(func._schema.returns) == 1 else (args[0], work)


def _count(mask: Tensor, shape: torch.Size) -> int:
    with unset_fake_temporarily():
        return int(mask.broadcast_to(shape).sum())  # Megatron's masks have the shape of what they select from, or fewer axes


def _routed_evenly(routing: Callable[..., Any]) -> Callable[..., Any]:
    """Around a router's choice: token ``t`` goes to the experts ``t k``, ``t k + 1`` ..., so that all have equally many."""

    def routed(self: Any, *args: Any, **kwargs: Any) -> Any:
        probs, routing_map = routing(self, *args, **kwargs)
        tokens, experts = routing_map.shape
        with unset_fake_temporarily():
            chosen = torch.arange(tokens * self.topk, device="cuda").view(tokens, self.topk) % experts
            return probs, torch.zeros(tokens, experts, dtype=torch.bool, device="cuda").scatter_(1, chosen, True)

    return routed


def _convert(module: Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> Module:
    """``Module._apply``, by which a module is moved and converted: torch would swap fake parameters, which have references."""
    for child in module.children() if recurse else ():
        child._apply(function)  # type: ignore[no-untyped-call]  # a module may override it
    for parameter in module.parameters(recurse=False):
        parameter.data = function(parameter.detach())
    for name, buffer in module.named_buffers(recurse=False):
        module._buffers[name] = function(buffer)
    return module


def _gather_own(object_list: list[Any], obj: Any, group: Any = None) -> None:
    """``all_gather_object``: every rank has the same."""
    object_list[:] = [obj] * len(object_list)


def _copied_contents(copy: Callable[..., Any]) -> Callable[..., Any]:
    """Around ``UntypedStorage.copy_``: torch keeps each storage without contents that it copies as the key of a cache."""

    def copied(self: UntypedStorage, source: UntypedStorage, *args: Any, **kwargs: Any) -> UntypedStorage:
        return self if self.device.type == "meta" else copy(self, source, *args, **kwargs)

    return copied


def _own_data(received: Sequence[Any]) -> Callable[..., Any]:
    """``moved``: what the last stage computed is what this rank has, with these losses where it has none."""

    def moved(data: Any, *_: Any) -> Any:
        losses, tokens, predicted = data or ((), torch.zeros([], dtype=torch.int, device=torch.cuda.current_device()), None)
        return losses or list(received), tokens, predicted

    return moved


def _of_one_shape(communicate: Callable[..., Any]) -> Callable[..., Any]:
    """Around transfers between stages: a tensor has the shape that the schedule expects, for no other stage tells its own.

    They are those of an object with Megatron's configuration, or of a call with the ``model``.
    """

    def made(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = self.config if "model" not in kwargs else get_model_config(tree_leaves(kwargs["model"])[0])
        with patch.object(config, "variable_seq_lengths", False):
            return communicate(self, *args, **kwargs)

    return made


def _zeros(tensor: FakeTensor, *, force: bool = False) -> np.ndarray[Any, Any]:
    """``Tensor.numpy`` of a tensor without contents."""
    with unset_fake_temporarily():
        zeros: np.ndarray[Any, Any] = torch.zeros(tensor.shape, dtype=tensor.dtype).numpy()
    return zeros


def _stacked_scalars(tensor: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``torch.tensor``, which would read the contents of fake tensors in a list."""

    def made(data: Any, *args: Any, **kwargs: Any) -> Tensor:
        leaves = tree_leaves(data) if isinstance(data, list | tuple) else []
        if any(isinstance(leaf, FakeTensor) for leaf in leaves):
            return torch.stack([leaf.reshape(()) for leaf in leaves])
        return tensor(data, *args, **kwargs)

    return made
