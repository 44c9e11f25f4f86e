"""Weight gradients of linear layers that wait in a queue until their operation W."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor, UntypedStorage

from mindspeed.pipeline.recomputation import Unit

if TYPE_CHECKING:
    from mindspeed.pipeline.host_queue import HostQueue


class Product(Protocol):
    """The weight gradient of one linear layer for one micro-batch."""

    weight: Tensor

    def storages(self) -> list[UntypedStorage]:
        """Return the storages that wait for the product."""

    def prepare(self) -> None:
        """Start the communication that the product needs."""

    def add(self, before: Tensor | None) -> Tensor | None:
        """Return the gradient, added to ``before``; None where the product itself adds to a buffer."""


class WeightGradients:
    """The queue of a rank: products of each unit in the order of its backward pass.

    ``finished(chunk, weight, gradient)`` takes the gradient of a weight when all products of the unit for it are summed.
    ``staying`` are the identities of weights whose gradient stays in the backward pass.
    """

    def __init__(self, finished: Callable[[int, Tensor, Tensor | None], None], staying: Collection[int] = ()) -> None:
        self._finished = finished
        self._staying = staying
        self._queue: dict[Unit, deque[Product]] = {}
        self._uses: dict[Unit, defaultdict[int, int]] = {}
        self._sums: dict[int, Tensor | None] = {}
        self.collecting: Unit | None = None
        """Unit whose forward or backward pass runs, if its weight gradients wait."""
        self.due: Unit | None = None
        """Unit whose W comes next, a part of which may run behind a collective."""

        self.host: HostQueue | None = None
        """Moves units that wait to the host, where that is set."""

    def get(self) -> tuple[Unit | None, Unit | None]:
        """Return the units that are collected and due, which each of two passes in turns has for itself."""
        return self.collecting, self.due

    def set(self, units: tuple[Unit | None, Unit | None]) -> None:
        """Let these units be collected and due."""
        self.collecting, self.due = units

    def storages_of(self, unit: Unit) -> list[UntypedStorage]:
        """Return the storages that a unit keeps, each once."""
        storages = [storage for product in self._queue[unit] for storage in product.storages()]
        return list({storage.data_ptr(): storage for storage in storages}.values())

    @contextmanager
    def collected(self, unit: Unit, run: Literal["forward", "backward"]) -> Iterator[None]:
        """Let the linear layers of a forward or backward pass leave their products here.

        The unit whose W is next stays on the device beside the one that is collected, the others are moved to the host.
        """
        if self.host is not None:
            self.host.leave(list(self._queue)[1:])
            if run == "backward":
                self.host.free()
        self.collecting = unit
        try:
            yield
        finally:
            self.collecting = None
        if self.host is not None:
            self.host.free()
            self.host.count(list(self._queue))

    def unit_of(self, weight: Tensor) -> Unit | None:
        """Return the unit whose W makes the gradient of a weight that is used now; None where its gradient does not wait."""
        return self.collecting if weight.requires_grad and id(weight) not in self._staying else None

    def push(self, unit: Unit, product: Product) -> None:
        self._queue.setdefault(unit, deque()).append(product)
        self._uses.setdefault(unit, defaultdict(int))[id(product.weight)] += 1

    @torch.no_grad()
    def run(self, unit: Unit) -> None:
        """Run all products of a unit; the communication of each overlaps with the next product."""
        queue = self._queue.get(unit, deque())
        if self.host is not None:
            self.host.leave(list(self._queue)[2:])
            self.host.wait(unit)
            self.host.fetch_ahead(list(self._queue))
        if queue:
            queue[0].prepare()
        while queue:
            self._run_first(unit, queue)
        self._queue.pop(unit, None)
        self._uses.pop(unit, None)
        if self.host is not None:
            self.host.free()
            self.host.fetch_ahead(list(self._queue))

    @torch.no_grad()
    def run_behind(self) -> None:
        """Run one product of the unit that is due, while a collective of a backward pass is under way."""
        if self.due is not None and (queue := self._queue.get(self.due)):
            if self.host is not None:
                self.host.wait(self.due)
            self._run_first(self.due, queue)

    def _run_first(self, unit: Unit, queue: deque[Product]) -> None:
        product = queue.popleft()
        product.prepare()
        if queue:
            queue[0].prepare()
        key = id(product.weight)
        total = product.add(self._sums.pop(key, None))
        self._uses[unit][key] -= 1
        if self._uses[unit][key]:
            self._sums[key] = total
        else:
            self._finished(unit[0], product.weight, total)

    def __len__(self) -> int:
        return sum(map(len, self._queue.values()))


@dataclass(slots=True)
class QueuedTensor:
    """Tensor that waits in the queue, and its version: a change in place would make another gradient."""

    tensor: Tensor
    version: int = -1

    def __post_init__(self) -> None:
        self.version = self.tensor._version

    def take(self) -> Tensor:
        """Return the tensor. Raises RuntimeError if it was changed since."""
        if self.tensor._version != self.version:
            raise RuntimeError("a tensor needed for a deferred weight gradient was changed in place")
        return self.tensor
