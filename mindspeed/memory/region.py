"""A region of the forward pass whose graph is kept, and whose storages are recomputed when backward reaches it.

A checkpoint builds a second graph in the backward pass. Where a function uses its input twice, the gradients of that input are
then summed before they meet those of its other users: another order than without the checkpoint. A region keeps the graph of
the first forward pass, and fills the storages that this graph saved: equal bits, for the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.nn import Parameter

from mindspeed.memory.parked import LayerPart, Parked, Source
from mindspeed.memory.recomputation import RandomState, generators, recomputation, replayed
from mindspeed.plugins.patches import Function
from mindspeed.problems import Problem, RunError, advice

StorageLayout = tuple[int, ...]


class Region:
    """A part of a module, without the weights of linear layers, whose storages leave until backward needs them.

    One object per module, for all of its forward passes. ``owner`` and ``module`` are named in messages; ``random`` are
    generators beside those of host and device (Megatron's tracker). The first pass is repeated at once, to tell
    the storages that the function makes from those that it only reads: parameters, buffers, masks. Where autograd is off
    nothing is parked.

    >>> with region.entered(norm, hidden) as pass_:
    ...     normed = norm(hidden)
    >>> output = attention(normed)
    >>> pass_.park_after(output, normed)
    """

    def __init__(self, owner: str, random: Sequence[RandomState] = (), module: str = "a region") -> None:
        self.part = LayerPart(owner, module)
        self._random = tuple(random)
        self._made: dict[StorageLayout, frozenset[int]] = {}

    def entered(self, function: Function, *inputs: Any) -> RegionPass:
        """Return the context of one forward pass. ``function(*inputs)`` must repeat what is computed inside it."""
        if not (self.part.active and torch.is_grad_enabled()):
            return RegionPass(None, self._made, self.part)
        return RegionPass(Repetition(self.part, function, inputs, (*generators(), *self._random)), self._made, self.part)


class RegionPass(AbstractContextManager["RegionPass"]):
    """Watch one forward pass through a region."""

    def __init__(self, repetition: Repetition | None, made: dict[StorageLayout, frozenset[int]], part: LayerPart) -> None:
        self._repetition = repetition
        self._known = made
        self._part = part
        self._saved: list[UntypedStorage | None] = []
        self._parked: Parked | None = None

    def __enter__(self) -> RegionPass:
        if self._repetition is not None:
            # Only the innermost hooks apply: those around the region see what it saves through these.
            self._outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
            self._hooks: Any = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
            self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._repetition is not None:
            self._hooks.__exit__(*error)
            del self._hooks  # it has methods of this object: a circle, which would keep the inputs until they are collected

    def _pack(self, tensor: Tensor) -> Any:
        packed = tensor if self._outer is None else self._outer[0](tensor)
        self._saved.append(tensor.untyped_storage() if packed is tensor else None)
        return packed

    def _unpack(self, packed: Any) -> Any:
        if self._parked is not None:
            self._parked.require_present("backward")
        return packed if self._outer is None else self._outer[1](packed)

    def park_after(self, output: Tensor, *made: Tensor) -> Parked | None:
        """Park what the region saved and made: ``output`` is computed, and its gradient arrives before they are read again.

        ``made`` are the tensors that the region returned; nobody else may read them from here on. Raises RunError with MS614
        in the backward pass where other shapes are recomputed. Returns None where nothing is parked.
        """
        repetition = self._repetition
        if repetition is None or not output.requires_grad:
            return None
        storages = [*self._saved, *(tensor.untyped_storage() for tensor in made)]
        inside = self._made_inside(storages, repetition)
        last = {storages[index]._cdata: index for index in inside}  # type: ignore[union-attr]
        order = sorted(last.values())
        repetition.expect(len(storages), {index: place for place, index in enumerate(order)})
        parked = Parked([storage for index in order if (storage := storages[index]) is not None], repetition, self._part)
        self._part.beside = repetition.bytes_kept_beside(self._saved)
        self._saved, self._repetition, self._parked = [], None, parked
        parked.park()
        output.register_hook(lambda gradient: parked.wait())  # type: ignore[no-untyped-call]
        return parked

    def saved_storages(self, *made: Tensor) -> list[UntypedStorage]:
        """The storages that the region saved and that belong to it: those it made, and those of inputs that need a gradient.

        Parameters, buffers, masks and tables are left out. ``made`` are the tensors that the region returned.
        """
        repetition, self._repetition = self._repetition, None
        if repetition is None:
            return []
        saved, self._saved = self._saved, []
        inside = self._made_inside([*saved, *(tensor.untyped_storage() for tensor in made)], repetition)
        inputs = repetition.differentiated_inputs()
        chosen = {s._cdata: s for i, s in enumerate(saved) if s is not None and (i in inside or s._cdata in inputs)}
        return list(chosen.values())

    def _made_inside(self, storages: Sequence[UntypedStorage | None], repetition: Repetition) -> frozenset[int]:
        """Indices of the storages that the function makes anew at each call."""
        layout = _layout(storages, repetition.inputs)
        if layout not in self._known:
            again: list[UntypedStorage] = []
            repetition.run(lambda index, storage: again.append(storage))
            repetition.require(len(again) == len(storages), f"{len(again)} tensors instead of {len(storages)}")
            pairs = enumerate(zip(storages, again, strict=True))
            self._known[layout] = frozenset(i for i, (a, b) in pairs if a is not None and a._cdata != b._cdata)
        return self._known[layout]


class Repetition(Source):
    """The source of recomputed contents: a function with its inputs and the random states of before its first call."""

    def __init__(self, part: LayerPart, function: Function, inputs: Sequence[Any], random: Sequence[RandomState]) -> None:
        self._part = part
        self._function = function
        self.inputs = [value.detach() if isinstance(value, Tensor) else value for value in inputs]
        self._weights = [isinstance(value, Parameter) for value in inputs]
        self._needs_gradient = [isinstance(value, Tensor) and value.requires_grad for value in inputs]
        self._versions = [_version(value) for value in self.inputs]
        self._random = random
        self._states = [generator.get() for generator in random]

    def differentiated_inputs(self) -> set[int]:
        """Addresses of the storages of inputs that need a gradient."""
        pairs = zip(self.inputs, self._needs_gradient, strict=True)
        return {value.untyped_storage()._cdata for value, needs in pairs if needs}

    def bytes_kept_beside(self, saved: Sequence[UntypedStorage | None]) -> int:
        """Bytes of inputs that are kept for the repetition alone: no weights, and not among what was saved."""
        known = {storage._cdata for storage in saved if storage is not None}
        pairs = zip(self.inputs, self._weights, strict=True)
        tensors = [value.untyped_storage() for value, weight in pairs if isinstance(value, Tensor) and not weight]
        return sum({s._cdata: s.nbytes() for s in tensors if s._cdata not in known}.values())

    def expect(self, count: int, places: Mapping[int, int]) -> None:
        """Expect ``count`` tensors, and fill the storage ``places[i]`` with the i-th that is saved or returned."""
        self._count, self._places = count, places

    def give(self, storages: Sequence[UntypedStorage]) -> None:
        """Repeat the function and copy each storage when it is complete. Raises RunError with MS614 for other shapes."""

        def fill(index: int, storage: UntypedStorage) -> None:
            if (place := self._places.get(index)) is None:
                return
            kept, found = storages[place].nbytes(), storage.nbytes()
            self.require(kept == found, f"a tensor of {found} bytes instead of {kept}")
            storages[place].copy_(storage)

        self.require(self._versions == [_version(value) for value in self.inputs], "from an input that was changed in place")
        count = self.run(fill)
        self.require(count == self._count, f"{count} tensors instead of {self._count}")

    def run(self, receive: Callable[[int, UntypedStorage], None]) -> int:
        """Repeat the function and hand over the storage of each tensor that is saved, then returned; return their number."""
        count = 0

        def pack(tensor: Tensor) -> None:
            nonlocal count
            receive(count, tensor.untyped_storage())
            count += 1

        pairs = zip(self.inputs, self._needs_gradient, strict=True)
        inputs = [value.detach().requires_grad_() if needs else value for value, needs in pairs]
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed)
        with recomputation(), torch.enable_grad(), replayed(self._random, self._states):
            with hooks:
                made = self._function(*inputs)
            for tensor in made if isinstance(made, tuple) else (made,):
                pack(tensor)
        return count

    def require(self, holds: bool, found: str) -> None:
        """Raise RunError with MS614 unless a condition on what was recomputed holds."""
        if not holds:
            owner = self._part.owner
            fix = f"remove {owner}, or make the function compute the same values at each call with the same inputs"
            raise RunError([Problem("MS614", f"{owner}: {self._part.module} recomputed {found}", (owner,), fix=advice(fix))])


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) else 0


def _layout(storages: Sequence[UntypedStorage | None], inputs: Sequence[Any]) -> StorageLayout:
    """The pattern of equal storages among what was saved and returned and the inputs, which decides what the function makes."""
    known = {value.untyped_storage()._cdata: -1 - place for place, value in enumerate(inputs) if isinstance(value, Tensor)}
    found = ((storage._cdata if storage is not None else 0) for storage in storages)
    return tuple(known.setdefault(address, index) for index, address in enumerate(found))
