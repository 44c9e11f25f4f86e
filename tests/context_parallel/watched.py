"""What the tests of traffic, overlap and memory run on every rank."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks._sockets import bytes_on_sockets
from mindspeed.ops.process_groups import PendingCollective
from mindspeed.platforms.collectives import CollectiveTraffic, traffic
from tests.context_parallel.algorithms import Algorithm, Attend

DELAY = 0.02
"""Seconds that a slow transfer takes, and a slow block."""


@dataclass
class Share:
    """One rank's part of a call: the function, its inputs and the gradient of its result."""

    attend: Attend
    inputs: list[Tensor]
    dout: Tensor

    @classmethod
    def of(cls, algorithm: Algorithm, tensors: Sequence[Tensor]) -> Share:
        layout = algorithm.layout(dist.get_world_size())
        *inputs, dout = (layout.take(x, dist.get_rank()).clone() for x in tensors)
        return cls(algorithm.attend(tensors[0].shape[0]), [x.requires_grad_() for x in inputs], dout)

    def forward(self) -> Tensor:
        return self.attend(*self.inputs)

    def both(self) -> list[Tensor]:
        """Result and gradients."""
        for x in self.inputs:
            x.grad = None
        out = self.forward()
        out.backward(self.dout)
        return [out.detach(), *(x.grad for x in self.inputs)]  # type: ignore[list-item]


@dataclass(frozen=True)
class Sent:
    """Bytes that a rank sends in forward and in backward, and how often it calls each kind of collective."""

    bytes: tuple[int, int]
    calls: tuple[dict[str, int], dict[str, int]]


def counted(cases: dict[str, Algorithm], tensors: Sequence[Tensor]) -> dict[str, Sent]:
    """What each algorithm sends, counted at the process group."""
    found = {}
    for name, algorithm in cases.items():
        share = Share.of(algorithm, tensors)
        with traffic() as forward:
            out = share.forward()
        with traffic() as backward:
            out.backward(share.dout)
        sides = forward, backward
        inner = algorithm.inner if algorithm.kind == "hybrid" else dist.get_world_size()
        calls = [{kind: side.total(kind).calls for kind, _ in side if side.total(kind).bytes} for side in sides]
        found[name] = Sent((_sent(forward, inner), _sent(backward, inner)), (calls[0], calls[1]))
    return found


def _sent(counts: CollectiveTraffic, inner: int) -> int:
    """Bytes that leave a rank: of what it hands to a collective of n ranks, all but its own n-th."""
    world = dist.get_world_size()
    others = counts.total("all_to_all").bytes * (inner - 1) // inner
    collected = counts.total("all_gather").bytes + counts.total("reduce_scatter").bytes
    return counts.total("send").bytes + others + collected * (world - 1) // world


def on_the_wire(
    cases: dict[str, Algorithm], tensors: Sequence[Tensor], count: Callable[[], int] = bytes_on_sockets
) -> dict[str, int]:
    """What each algorithm sends in forward and backward together, as the kernel counts it."""
    found = {}
    for name, algorithm in cases.items():
        share = Share.of(algorithm, tensors)
        share.both()  # connections are made
        dist.barrier()
        before = count()
        dist.barrier()
        share.both()
        dist.barrier()
        found[name] = count() - before
    return found


@dataclass(eq=False)
class Recorder(TorchDispatchMode):
    """Records transfers that are posted and waited for, and blocks of attention that are computed between.

    With ``slow`` each of them takes DELAY; ``at_once`` waits for a transfer when it is posted, as code would that does not
    post early.
    """

    slow: bool = False
    at_once: bool = False
    events: list[tuple[str, int]] = field(default_factory=list)
    waited: float = 0.0
    most: dict[torch.dtype, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._messages: list[tuple[torch.dtype, StorageWeakRef]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "fusion_attention" in str(func):
            self.count_alive()
            self.events.append(("block", 0))
            if self.slow:
                time.sleep(DELAY)
        return func(*args, **(kwargs or {}))

    def count_alive(self) -> None:
        """How many storages of posted messages are held by anyone."""
        here = {(dtype, ref.cdata) for dtype, ref in self._messages if not ref.expired()}
        for dtype in {dtype for dtype, _ in here}:
            self.most[dtype] = max(self.most.get(dtype, 0), sum(one is dtype for one, _ in here))

    @contextmanager
    def watching(self) -> Iterator[Recorder]:
        post = dist.batch_isend_irecv

        def posted(operations: list[dist.P2POp]) -> list[Any]:
            number = sum(kind == "post" for kind, _ in self.events)
            self.events.append(("post", number))
            self._messages += [(op.tensor.dtype, StorageWeakRef(op.tensor.untyped_storage())) for op in operations]
            self.count_alive()
            handle = _Transfer(self, number, post(operations), time.perf_counter() + DELAY)
            if self.at_once:
                handle.wait()
            return [handle]

        dist.batch_isend_irecv = posted
        try:
            with self:
                yield self
        finally:
            dist.batch_isend_irecv = post


@dataclass
class _Transfer:
    """The handle of one batch of messages."""

    recorder: Recorder
    number: int
    works: list[Any]
    done: float

    def wait(self) -> None:
        if ("wait", self.number) not in self.recorder.events:
            self.recorder.events.append(("wait", self.number))
            if self.recorder.slow:
                begin = time.perf_counter()
                time.sleep(max(0.0, self.done - begin))
                self.recorder.waited += time.perf_counter() - begin
        for work in self.works:
            work.wait()
        self.works = []


@dataclass(frozen=True)
class Run:
    """What a recorder saw of forward and backward. ``alive``: most messages of the inputs' type held at once."""

    events: tuple[list[tuple[str, int]], list[tuple[str, int]]]
    alive: tuple[int, int]
    seconds: float
    waited: float


def recorded(algorithm: Algorithm, tensors: Sequence[Tensor], slow: bool = False, at_once: bool = False) -> Run:
    share, sides = Share.of(algorithm, tensors), (Recorder(slow, at_once), Recorder(slow, at_once))
    if slow:
        share.both()  # kernels are loaded
    dist.barrier()
    begin = time.perf_counter()
    with sides[0].watching():
        out = share.forward()
    with sides[1].watching():
        out.backward(share.dout)
    seconds = time.perf_counter() - begin
    alive = [side.most.get(tensors[0].dtype, 0) for side in sides]
    return Run((sides[0].events, sides[1].events), (alive[0], alive[1]), seconds, sides[0].waited + sides[1].waited)


def all_recorded(cases: dict[str, Algorithm], tensors: Sequence[Tensor], **keywords: bool) -> dict[str, Run]:
    return {name: recorded(algorithm, tensors, **keywords) for name, algorithm in cases.items()}


def kept_bytes(cases: dict[str, Algorithm], tensors: Sequence[Tensor]) -> dict[str, tuple[int, int]]:
    """Bytes of distinct storages that autograd saves for backward, and of those that contexts of functions hold beside them."""
    found = {}
    for name, algorithm in cases.items():
        share = Share.of(algorithm, tensors)
        storages: dict[int, int] = {}

        def keep(x: Tensor, storages: dict[int, int] = storages) -> Tensor:
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = share.forward()
        saved = sum(storages.values())
        for x in _held(out.grad_fn):
            keep(x)
        found[name] = saved, sum(storages.values()) - saved
        out.backward(share.dout)  # frees what is saved, the result among it, whose node knows the process groups
    return found


def _held(node: Any) -> Iterator[Tensor]:
    """Tensors that the nodes of a graph hold as attributes, at any depth."""
    nodes, seen = [node], set[int]()
    while nodes:
        one = nodes.pop()
        nodes += [after for after, _ in one.next_functions if after is not None]
        things = [getattr(one, "__dict__", {})]
        while things:
            thing = things.pop()
            if id(thing) in seen or isinstance(thing, type | ModuleType | FunctionType):
                continue
            seen.add(id(thing))
            if isinstance(thing, Tensor):
                yield thing
            elif type(thing).__module__.partition(".")[0] in ("builtins", "mindspeed"):
                things += gc.get_referents(thing)


def results(cases: dict[str, Algorithm], tensors: Sequence[Tensor], early: bool = False) -> dict[str, list[Tensor]]:
    """Results and gradients; with ``early`` what is used is what was there before a wait."""
    wait = PendingCollective.wait
    if early:
        PendingCollective.wait = used_early(wait)  # type: ignore[method-assign]
    try:
        return {name: Share.of(algorithm, tensors).both() for name, algorithm in cases.items()}
    finally:
        PendingCollective.wait = wait  # type: ignore[method-assign]


def used_early(wait: Callable[[PendingCollective], Tensor]) -> Callable[[PendingCollective], Tensor]:
    """Around ``PendingCollective.wait``: the received tensor as it was before; the wait itself keeps the transport in order."""

    def late(pending: PendingCollective) -> Tensor:
        found = pending.received.clone()
        wait(pending)
        return found

    return late
