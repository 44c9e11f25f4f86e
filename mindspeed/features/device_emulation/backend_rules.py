"""Process groups with the rules of NCCL or HCCL: gloo moves the data when the rules allow it, and a dead-lock is a report.

A communicator is created, an operation is queued and a wait ends as `mindspeed.platforms.backend_rules` says. Waits block the
host here, where they block a stream of a device: the operations that follow a wait in a program also follow it in its stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from inspect import signature
from itertools import count
from math import prod
from typing import Any, Final, NamedTuple, NoReturn
from unittest.mock import patch

import torch
from torch.distributed import distributed_c10d

from mindspeed.features.device_emulation import functional_collectives
from mindspeed.features.device_emulation.coordinator import RankConnection, Server
from mindspeed.features.device_emulation.queues import Communicator, Operation, Part
from mindspeed.platforms import backend_rules
from mindspeed.platforms.backend_rules import RuleSet
from mindspeed.platforms.call_site import CallSite, call_site
from mindspeed.platforms.collectives import CollectiveCall, read_call
from mindspeed.platforms.cpu_host import is_host
from mindspeed.plugins.patches import Function, wrapper
from mindspeed.problems import Fix, Problem

_ADDRESS: Final = "mindspeed/backend-rules"
_OBJECTS: Final = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
                   "recv_object_list")  # fmt: skip
"""Functions of torch that put objects in tensors on the right device."""
_REDUCTIONS: Final = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "_reduce_scatter_base")
_DIFFERING: Final = ("all_to_all", "all_to_all_single", "gather", "scatter", "all_gather")
"""Collectives whose tensors may have other sizes on other ranks."""
_SENDS: Final = ("send", "isend")
_RECEIVES: Final = ("recv", "irecv")


class _Job:
    """The rules of this process from the creation of its process groups to their end."""

    def __init__(self, rules: RuleSet, connection: RankConnection, server: Server | None) -> None:
        self.rules = rules
        self.connection = connection
        self.server = server
        self.created: set[Communicator] = set()
        self.on_host: set[str] = set()
        self.inside = False
        self.splits: Counter[str] = Counter()
        self.coalesced: list[list[tuple[CollectiveCall, CallSite]]] = []
        own = vars(distributed_c10d.ProcessGroup)  # by getattr, a method of a C++ class would no longer bind
        self.methods = {name: own[name] for name in backend_rules.METHODS if name in own}
        self.remove_functional = functional_collectives.install()
        self._numbers = count()

    def operation(self, name: str, communicator: Communicator, parts: Sequence[Part], site: CallSite) -> Operation:
        return Operation(self.connection.rank, next(self._numbers), name, communicator, tuple(parts), str(site))

    def start(self, name: str, communicator: Communicator, parts: Sequence[Part], site: CallSite) -> Operation:
        """Start an operation, behind the creation of its communicator where that does not exist."""
        if communicator not in self.created and not self.rules.eager and communicator.name not in self.on_host:
            creation = communicator._replace(creation=True)
            made = self.operation(name, creation, [Part("all", None, ())], site)
            self.connection.wait([made.number], made.site, made)
            backend_rules.created.append(communicator.group + (backend_rules.PAIR if communicator.pair else ""))
        self.created.add(communicator)
        started = self.operation(name, communicator, parts, site)
        self.connection.start(started)
        return started


_job: _Job | None = None


class RuledWork:
    """Handle of an operation that is complete when the rules say so."""

    def __init__(self, work: Any, job: _Job, operation: Operation) -> None:
        self._work, self._job, self._operation = work, job, operation

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        if _job is self._job:
            self._job.connection.wait([self._operation.number], str(call_site()))
        return self._work.wait(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@wrapper
def joined(init_process_group: Function, *args: Any, **kwargs: Any) -> None:
    """``init_process_group``: rank 0 begins to coordinate the ranks."""
    global _job
    init_process_group(*args, **kwargs)
    ranks, rank = distributed_c10d.get_world_size(), distributed_c10d.get_rank()
    if backend_rules.ACTIVE is None or ranks == 1 or distributed_c10d.get_backend() == "fake":
        return
    backend_rules.created.clear()
    rules, store = backend_rules.rule_set(backend_rules.ACTIVE), distributed_c10d._get_default_store()
    server = None
    if rank == 0:
        server = Server(rules.backend, ranks)
        store.set(_ADDRESS, server.address)
    _job = _Job(rules, RankConnection(store.get(_ADDRESS).decode(), rank), server)
    for name, method in _job.methods.items():
        setattr(distributed_c10d.ProcessGroup, name, _guarded(name, method))
    if rules.eager:
        backend_rules.created.append(_communicator(distributed_c10d.GroupMember.WORLD, ()).group)


@wrapper
def left(destroy_process_group: Function, group: Any = None) -> None:
    """``destroy_process_group``: with the group of all ranks, this rank ends."""
    global _job
    if _job is not None and (group is None or group is distributed_c10d.GroupMember.WORLD):
        job, _job = _job, None
        for name, method in job.methods.items():
            setattr(distributed_c10d.ProcessGroup, name, method)
        job.remove_functional()
        job.connection.end()
        if job.server is not None:
            job.server.close()
    destroy_process_group(group)


@wrapper
def ruled(collective: Function, *args: Any, **kwargs: Any) -> Any:
    """Start a collective or a message by the rules; wait for it by the rules as well, unless it is asynchronous."""
    job = _job
    if job is None or job.inside:
        return collective(*args, **kwargs)
    call = read_call(collective, args, kwargs)
    ranks = _ranks_of(call.process_group)
    is_message = call.kind in (*_SENDS, *_RECEIVES)
    if len(ranks) < 2 or job.connection.rank not in ranks or (is_message and str(call.process_group.group_name) in job.on_host):
        return collective(*args, **kwargs)
    site = call_site()
    _refuse(job, call, site)
    if call.process_group in distributed_c10d._world.pg_coalesce_state and job.coalesced:
        job.coalesced[-1].append((call, site))
        with _unruled(job):
            return collective(*args, **kwargs)
    communicator, part = _addressed(job, call, ranks)
    towards = "" if part.peer is None else f" {'to' if part.direction == 'send' else 'from'} rank {part.peer}"
    started = job.start(f"{call.kind}{towards}", communicator, [part], site)
    if not call.asynchronous:
        job.connection.wait([started.number], str(site))
    with _unruled(job):
        work = collective(*args, **kwargs)
    return RuledWork(work, job, started) if call.asynchronous and work is not None else work


@wrapper
def ruled_batch(batch_isend_irecv: Function, p2p_op_list: Sequence[Any]) -> list[Any]:
    """``batch_isend_irecv``: one operation on the communicator of the group."""
    job = _job
    if job is None or job.inside or not p2p_op_list:
        return list(batch_isend_irecv(p2p_op_list))
    group = p2p_op_list[0].group or distributed_c10d.GroupMember.WORLD
    ranks, site = _ranks_of(group), call_site()
    calls = [read_call(op.op, (op.tensor,), {"group": group, _peer_name(op.op): op.peer}) for op in p2p_op_list]
    for call in calls:
        _refuse(job, call, site)
    started = job.start("batch_isend_irecv", _communicator(group, ranks), [_message(call, ranks) for call in calls], site)
    with _unruled(job):
        return [RuledWork(work, job, started) for work in batch_isend_irecv(p2p_op_list)]


@wrapper
@contextmanager
def ruled_group(manager: Function, *args: Any, **kwargs: Any) -> Iterator[Any]:
    """``_coalescing_manager``: one operation, which begins at its end."""
    job = _job
    if job is None or job.inside:
        with manager(*args, **kwargs) as coalesced:
            yield coalesced
        return
    arguments = signature(manager).bind(*args, **kwargs).arguments
    calls: list[tuple[CollectiveCall, CallSite]] = []
    started = None
    with ExitStack() as ended:
        coalesced = ended.enter_context(manager(*args, **kwargs))
        job.coalesced.append(calls)
        try:
            yield coalesced
        finally:
            job.coalesced.pop()
        if calls:
            group = arguments.get("group") or distributed_c10d.GroupMember.WORLD
            parts = [Part("all", None, _content(call)) for call, _ in calls]
            site = calls[0][1]
            started = job.start(f"coalesced {calls[0][0].kind}", _communicator(group, _ranks_of(group)), parts, site)
            if not arguments.get("async_ops"):
                job.connection.wait([started.number], str(site))
        with _unruled(job):  # torch starts the calls now
            ended.close()
    if started is not None:
        coalesced.works = [RuledWork(work, job, started) for work in coalesced.works]


@wrapper
def ruled_barrier(barrier: Function, *args: Any, **kwargs: Any) -> Any:
    """``barrier``: a collective that holds the host."""
    job, group = _job, signature(barrier).bind(*args, **kwargs).arguments.get("group") or distributed_c10d.GroupMember.WORLD
    ranks = _ranks_of(group)
    if job is not None and not job.inside and len(ranks) > 1 and job.connection.rank in ranks:
        site = call_site()
        started = job.start("barrier", _communicator(group, ranks), [Part("all", None, ("barrier",))], site)
        job.connection.wait([started.number], str(site))
        with _unruled(job):
            return barrier(*args, **kwargs)
    return barrier(*args, **kwargs)


@wrapper
def ruled_new_group(new_group: Function, *args: Any, **kwargs: Any) -> Any:
    """``new_group``: all ranks of the job create the same groups in the same order, or the ranks of the group alone."""
    job = _job
    if job is None or job.inside:
        return new_group(*args, **kwargs)
    arguments = signature(new_group).bind(*args, **kwargs).arguments
    world = _ranks_of(distributed_c10d.GroupMember.WORLD)
    ranks = tuple(sorted(arguments.get("ranks") or world))
    local = bool(arguments.get("use_local_synchronization"))
    if not local or job.connection.rank in ranks:
        site = call_site()
        everyone = Communicator(f"groups of {ranks}" if local else "groups", "default", ranks if local else world)
        made = job.operation(f"new_group of ranks {', '.join(map(str, ranks))}", everyone, [Part("all", None, ranks)], site)
        job.connection.wait([made.number], made.site, made)
    with _unruled(job):
        group = new_group(*args, **kwargs)
    if job.connection.rank in ranks and "gloo" in str(arguments.get("backend") or ""):
        job.on_host.add(group.group_name)
    elif job.connection.rank in ranks and job.rules.eager and len(ranks) > 1:
        backend_rules.created.append(_communicator(group, ranks).group)
    return group


@wrapper
def ruled_split_group(split_group: Function, *args: Any, **kwargs: Any) -> Any:
    """``split_group``: one operation on the communicator of the parent, whose ranks all name the same parts."""
    job = _job
    if job is None or job.inside:
        return split_group(*args, **kwargs)
    arguments, site = signature(split_group).bind(*args, **kwargs).arguments, call_site()
    if job.rules.no_split:
        _fail(job, "split_group", _Refusal(job.rules.no_split, "create the groups by new_group"), site)
    parent: Any = arguments.get("parent_pg") or distributed_c10d.GroupMember.WORLD
    ranks = _ranks_of(parent)
    parts = [tuple(sorted(ranks[rank] for rank in part)) for part in arguments["split_ranks"]]
    started = job.start("split_group", _communicator(parent, ranks), [Part("all", None, ("split_group", *parts))], site)
    job.connection.wait([started.number], str(site))
    own = next((part for part in parts if job.connection.rank in part), None)
    if own is None:
        return None
    job.splits[parent.group_name] += 1
    name = f"{parent.group_name} split {job.splits[parent.group_name]}: {own}"  # torch's name depends on a rank's other groups
    with _unruled(job), patch.object(distributed_c10d, "_process_group_name", lambda *args, **kwargs: name):
        group = distributed_c10d.new_group(own, group_desc=arguments.get("group_desc"), use_local_synchronization=True)
    if len(own) > 1:
        backend_rules.created.append(_communicator(group, own).group)
    return group


@wrapper
def ruled_synchronize(synchronize: Function, *args: Any, **kwargs: Any) -> None:
    """``torch.cuda.synchronize``: the host waits for all operations of this rank."""
    if _job is not None:
        _job.connection.wait(None, str(call_site()))
    synchronize(*args, **kwargs)


@contextmanager
def _unruled(job: _Job) -> Iterator[None]:
    """Let torch call its own functions."""
    job.inside = True
    try:
        yield
    finally:
        job.inside = False


def _guarded(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse a method of process groups where it is called without a function of torch.distributed, whose rules are checked."""

    @wraps(method)
    def guarded(group: Any, *args: Any, **kwargs: Any) -> Any:
        if _job is not None and not _job.inside and len(_ranks_of(group)) > 1 and str(group.group_name) not in _job.on_host:
            site = call_site()
            text = f"{name} is called on a process group directly, so the rules of {_job.rules.backend} cannot be checked"
            fix = Fix.advise("call the function of torch.distributed")
            _job.connection.fail(Problem("MS520", text, site.features, chain=(f"called at {site}",), fix=fix))
        return method(group, *args, **kwargs)

    return guarded


def _ranks_of(group: Any) -> tuple[int, ...]:
    if group is None or group is distributed_c10d.GroupMember.NON_GROUP_MEMBER:
        return ()
    return tuple(distributed_c10d.get_process_group_ranks(group))


def _communicator(group: Any, ranks: tuple[int, ...]) -> Communicator:
    return Communicator(str(group.group_name), getattr(group, "group_desc", "") or str(group.group_name), ranks)


def _addressed(job: _Job, call: CollectiveCall, ranks: tuple[int, ...]) -> tuple[Communicator, Part]:
    """Return the communicator of a call and its part in it."""
    whole = _communicator(call.process_group, ranks)
    if call.kind not in (*_SENDS, *_RECEIVES):
        return whole, Part("all", None, _content(call), *_exchanged(call, len(ranks)))
    message = _message(call, ranks)
    if job.rules.eager or message.peer is None:
        return whole, message
    pair = tuple(sorted((job.connection.rank, message.peer)))
    return whole._replace(ranks=pair, pair=True), message


def _message(call: CollectiveCall, ranks: tuple[int, ...]) -> Part:
    """Return the part of a rank in a message."""
    peer = call.arguments.get("dst", call.arguments.get("src"))
    if peer is None:
        within = call.arguments.get("group_dst", call.arguments.get("group_src"))
        peer = None if within is None else ranks[within]
    tensor = call.arguments["tensor"]
    return Part("send" if call.kind in _SENDS else "recv", peer, (_type(tensor), tensor.numel()))


def _peer_name(function: Function) -> str:
    return "dst" if function.__name__ in _SENDS else "src"


def _content(call: CollectiveCall) -> tuple[object, ...]:
    """Return what all ranks of a collective agree on."""
    tensors = call.inputs or call.outputs
    sizes = () if call.kind in _DIFFERING else (tuple(tensor.numel() for tensor in tensors),)
    options = [call.arguments[name] for name in ("src", "dst", "group_src", "group_dst", "op") if name in call.arguments]
    return (call.kind, _type(tensors[0]) if tensors else "", *sizes, *map(str, options))


def _exchanged(call: CollectiveCall, ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return how many elements an all-to-all sends to each rank and expects from each; nothing of other collectives."""
    if call.kind == "all_to_all":
        return tuple(tuple(tensor.numel() for tensor in side) for side in (call.inputs, call.outputs))
    if call.kind != "all_to_all_single":
        return ()
    return tuple(
        tuple(size * prod(tensor.shape[1:]) for size in sizes or [tensor.shape[0] // ranks] * ranks)
        for tensor, sizes in _split_sides(call)
    )


def _split_sides(call: CollectiveCall) -> list[tuple[torch.Tensor, list[int]]]:
    """Return input and output of ``all_to_all_single``, each with its split sizes, which may be given as an array."""
    sizes = (call.arguments.get(name) for name in ("input_split_sizes", "output_split_sizes"))
    given = ([] if some is None else [int(size) for size in some] for some in sizes)
    return list(zip((*call.inputs, *call.outputs), given, strict=True))


def _type(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


class _Refusal(NamedTuple):
    """The reason of a refusal and what to do."""

    reason: str
    fix: str


def _refuse(job: _Job, call: CollectiveCall, site: CallSite) -> None:
    """Raise PlatformError with MS520 for a call that the backend refuses."""
    if str(call.process_group.group_name) in job.on_host:
        return
    if (refusal := _refusal(job.rules, call, site)) is not None:
        _fail(job, call.kind, refusal, site)


def _fail(job: _Job, kind: str, refusal: _Refusal, site: CallSite) -> NoReturn:
    text = f"{job.rules.backend} refuses this {kind}: {refusal.reason}"
    job.connection.fail(Problem("MS520", text, site.features, chain=(f"called at {site}",), fix=Fix.advise(refusal.fix)))


def _refusal(rules: RuleSet, call: CollectiveCall, site: CallSite) -> _Refusal | None:
    tensors = (*call.inputs, *call.outputs)
    allowed = rules.reduced_types if call.kind in _REDUCTIONS else rules.types
    for tensor in tensors:
        if _type(tensor) not in allowed:
            return _Refusal(f"{_type(tensor)} is not a supported data type", "convert the tensor to another type first")
        if is_host(tensor) and not any(name in _OBJECTS for name in site.through):
            return _Refusal("the tensor is in host memory", "create the tensor on the device, or move it there")
    if call.kind in _RECEIVES and not call.arguments.keys() & {"src", "group_src"}:
        return _Refusal("it has no source rank", "give the source rank")
    if not rules.in_place_all_to_all and call.kind.startswith("all_to_all") and _overlap(call.inputs, call.outputs):
        return _Refusal("input and output overlap", "receive in another tensor")
    return _split_refusal(call) if call.kind == "all_to_all_single" else None


def _split_refusal(call: CollectiveCall) -> _Refusal | None:
    """Return what is wrong with the split sizes of ``all_to_all_single``."""
    ranks = len(_ranks_of(call.process_group))
    (sent, to), (received, from_) = _split_sides(call)
    for tensor, sizes in ((sent, to), (received, from_)):
        if not tensor.dim():
            return _Refusal("a tensor without dimensions cannot be split", "give it one dimension")
        rows = tensor.shape[0]
        if sizes and (len(sizes) != ranks or sum(sizes) != rows):
            return _Refusal(f"{sizes} does not split {rows} rows among {ranks} ranks", "give one size for each rank")
        if not sizes and rows % ranks:
            return _Refusal(f"{rows} rows do not divide among {ranks} ranks", "give split sizes")
    if not to and not from_ and sent.numel() != received.numel():
        return _Refusal(f"it sends {sent.numel()} elements and expects {received.numel()}", "give split sizes")
    return None


def _overlap(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> bool:
    spans = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in outputs if t.numel()]
    return any(t.data_ptr() < end and start < t.data_ptr() + t.nbytes for t in inputs if t.numel() for start, end in spans)
