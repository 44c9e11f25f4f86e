"""The rules of NCCL and HCCL: for each a program that obeys it and one that breaks it, on ranks of the pool."""

import time
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import mindspeed
from mindspeed.platforms.backend_rules import NAMES, RULES, rule_set
from mindspeed.plugins import MindSpeedError
from mindspeed.workbench.verification.pool import WorkerPool

Program = Callable[[int], None]


def ones(size: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(size, dtype=dtype, device="cuda")


def obeys_pair_communicator(rank: int) -> None:
    if rank == 0:
        dist.send(ones(), 1)
        dist.recv(ones(), 1)
    else:
        dist.recv(ones(), 0)
        dist.send(ones(), 0)


def breaks_pair_communicator(rank: int) -> None:
    works = [dist.isend(ones(), 1 - rank), dist.irecv(ones(), 1 - rank)]
    for work in works:
        work.wait()


def obeys_creation_blocks(rank: int) -> None:
    for group in (dist.new_group([0, 1], group_desc="up"), dist.new_group([0, 1], group_desc="down")):
        dist.all_reduce(ones(), group=group)


def breaks_creation_blocks(rank: int) -> None:
    up, down = (dist.new_group([0, 1], group_desc=name) for name in ("up", "down"))
    posted = dist.irecv(ones(), 1 - rank, group=(down, up)[rank])
    dist.isend(ones(), 1 - rank, group=(up, down)[rank])
    posted.wait()


def obeys_eager_communicator(rank: int) -> None:
    message = dist.isend(ones(), 1) if rank == 0 else dist.irecv(ones(), 0)
    dist.all_reduce(ones())
    message.wait()


def breaks_eager_communicator(rank: int) -> None:
    message = dist.irecv(ones(), 1) if rank == 0 else None
    dist.all_reduce(ones())
    message = message or dist.isend(ones(), 0)
    message.wait()


def exchange(rank: int, group: Any) -> None:
    works = dist.batch_isend_irecv([dist.P2POp(kind, ones(), 1 - rank, group) for kind in (dist.isend, dist.irecv)])
    for work in works:
        work.wait()


def obeys_batch(rank: int) -> None:
    exchange(rank, dist.new_group([0, 1]))


def breaks_batch(rank: int) -> None:
    """The third rank of the group does not take part in the first batch."""
    group = dist.new_group([0, 1, 2])
    if rank < 2:
        exchange(rank, group)


def obeys_queue_order(rank: int) -> None:
    answered = dist.new_group([0, 1])
    dist.send(ones(), 1, group=answered) if rank == 0 else dist.recv(ones(), 0, group=answered)
    posted = dist.irecv(ones(), 1) if rank == 0 else dist.isend(ones(), 0)
    posted.wait()


def breaks_queue_order(rank: int) -> None:
    if rank == 0:
        posted = dist.irecv(ones(), 1)
        dist.isend(ones(), 1)
        posted.wait()
    else:
        dist.recv(ones(), 0)
        dist.send(ones(), 0)


def obeys_collective_order(rank: int) -> None:
    dist.all_reduce(ones())
    dist.broadcast(ones(), 0)
    with dist._coalescing_manager(async_ops=True) as coalesced:
        for _ in range(2):
            dist.all_reduce(ones())
    coalesced.wait()


def breaks_collective_order(rank: int) -> None:
    works = [dist.all_reduce(ones(), async_op=True)] if rank == 0 else []
    works.append(dist.broadcast(ones(), 0, async_op=True))
    for work in works:
        work.wait()


def obeys_group_order(rank: int) -> None:
    for ranks in ([0], [0, 1]):
        dist.new_group(ranks)
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)


def breaks_group_order(rank: int) -> None:
    for ranks in ([0], [0, 1])[:: 1 - 2 * rank]:
        dist.new_group(ranks)


def obeys_synchronization(rank: int) -> None:
    work = dist.isend(ones(), 1) if rank == 0 else dist.irecv(ones(), 0)
    torch.cuda.synchronize()
    work.wait()
    dist.barrier()


def breaks_synchronization(rank: int) -> None:
    other = dist.new_group([0, 1])
    dist.send(ones(), 1) if rank == 0 else dist.recv(ones(), 0)
    if rank == 0:
        posted = dist.irecv(ones(), 1)
        torch.cuda.synchronize()
        dist.send(ones(), 1, group=other)
        posted.wait()
    else:
        dist.recv(ones(), 0, group=other)
        dist.send(ones(), 0)


def obeys_device_tensors(rank: int) -> None:
    dist.all_reduce(torch.ones(4).cuda())
    dist.all_gather_object([None, None], rank)


def breaks_device_tensors(rank: int) -> None:
    dist.all_reduce(torch.ones(4))


def obeys_types(rank: int) -> None:
    dist.broadcast(ones(dtype=torch.bfloat16), 0)
    dist.all_reduce(ones(), group=dist.new_group([0, 1]))


def breaks_types(rank: int) -> None:
    dist.broadcast(ones(dtype=torch.complex32), 0)


def obeys_reduced_types(rank: int) -> None:
    dist.all_reduce(ones(dtype=torch.int64))
    dist.broadcast(ones(dtype=torch.float64), 0)


def breaks_reduced_types(rank: int) -> None:
    dist.all_reduce(ones(dtype=torch.float8_e5m2))


def obeys_message_size(rank: int) -> None:
    dist.send(ones(6), 1) if rank == 0 else dist.recv(ones(6), 0)


def breaks_message_size(rank: int) -> None:
    dist.send(ones(6), 1) if rank == 0 else dist.recv(ones(8), 0)


obeys_known_source = obeys_message_size


def breaks_known_source(rank: int) -> None:
    dist.send(ones(), 1) if rank == 0 else dist.recv(ones())


def obeys_overlapping_buffers(rank: int) -> None:
    dist.all_to_all_single(ones(), ones())


def breaks_overlapping_buffers(rank: int) -> None:
    tensor = ones()
    dist.all_to_all_single(tensor, tensor)


def obeys_all_to_all_splits(rank: int) -> None:
    sizes = [1, 2][:: 1 - 2 * rank]
    dist.all_to_all_single(ones(3), ones(3), sizes, sizes)
    dist.all_to_all_single(ones(3), ones(3), numpy.array(sizes), numpy.array(sizes))  # as in Megatron's dispatcher
    dist.all_to_all_single(ones(0), ones(0))


def breaks_all_to_all_splits(rank: int) -> None:
    dist.all_to_all_single(ones(4), ones(4), [1, 3], [1, 2])


def obeys_all_to_all_sizes(rank: int) -> None:
    sent, expected = ([0, 2], [0, 1]) if rank == 0 else ([1, 3], [2, 3])
    dist.all_to_all_single(ones(sum(expected)), ones(sum(sent)), expected, sent)
    dist.all_to_all(*([ones(2 + rank), ones(3 + rank)] for _ in ("received", "sent")))


def breaks_all_to_all_sizes(rank: int) -> None:
    sent, expected = ([1, 3], [1, 3]) if rank == 0 else ([3, 2], [2, 2])
    dist.all_to_all_single(ones(4), ones(sum(sent)), expected, sent)


def obeys_split_group(rank: int) -> None:
    dist.all_reduce(ones(), group=dist.new_group([0, 1]))


def breaks_split_group(rank: int) -> None:
    dist.split_group(split_ranks=[[0, 1]])


def obeys_split_order(rank: int) -> None:
    dist.all_reduce(ones())
    both, first = dist.split_group(split_ranks=[[0, 1]]), dist.split_group(split_ranks=[[0]])
    dist.all_reduce(ones(), group=both)
    assert (first is None) is (rank == 1)


def breaks_split_order(rank: int) -> None:
    dist.all_reduce(ones(), async_op=True) if rank == 0 else None
    dist.split_group(split_ranks=[[0, 1]])


def obeys_functional_collectives(rank: int) -> None:
    other = dist.new_group([0, 1])
    started = [
        functional.all_reduce(ones(), "sum", other),
        functional.all_gather_tensor(ones(), 0, dist.group.WORLD),
        functional.reduce_scatter_tensor(ones(), "sum", 0, dist.group.WORLD),
        functional.all_to_all_single(ones(), [2, 2], [2, 2], dist.group.WORLD),
        functional.broadcast(ones() * (1 - rank), 0, dist.group.WORLD),
        *functional.all_reduce_coalesced([ones(), ones()], "sum", other),
    ]
    totals = [float(functional.wait_tensor(tensor).sum()) for tensor in reversed(started)][::-1]
    assert totals == [8, 8, 4, 4, 4, 8, 8]


def breaks_functional_collectives(rank: int) -> None:
    started = [functional.all_reduce(ones(), "sum", dist.group.WORLD)] if rank == 0 else []
    started.append(functional.broadcast(ones(), 0, dist.group.WORLD))
    for tensor in started:
        functional.wait_tensor(tensor)


def talks_round_torch(rank: int) -> None:
    dist.group.WORLD.allreduce([ones()]).wait()


def run(names: list[str]) -> float:
    """Run programs on this rank; the seconds of the last one, which may raise."""
    for name in names:
        start = time.monotonic()
        globals()[name](dist.get_rank())
    return time.monotonic() - start


def launch(pool: WorkerPool, rules: str, *names: str, ranks: int = 2) -> None:
    plan = mindspeed.plan(platform="cpu", settings={"device-emulation": {"backend": rules}})
    pool.call(run, ranks, list(names), plan=plan)


def follows(rules: str) -> list[str]:
    """The names of the rules of a set."""
    eager, hccl = rules == "nccl-rules-eager", rules == "hccl-rules"
    lazy = ("pair-communicator", "creation-blocks", "batch", "split-group")
    names = [rule.name for rule in RULES if (rule.hccl if hccl else rule.nccl)]
    return [name for name in names if name not in (lazy if eager else ("eager-communicator", "split-order"))]


def program(kind: str, rule: str) -> str:
    return f"{kind}_{rule.replace('-', '_')}"


@pytest.mark.parametrize("rules", NAMES)
def test_programs_that_obey_the_rules_run(pool: WorkerPool, rules: str) -> None:
    launch(pool, rules, *(program("obeys", rule) for rule in follows(rules)))


HANG = "MS619 with the rules of {backend} the job hangs"
WAIT = f"{HANG}: ranks 0, 1 wait for operations that never complete"
DIFFER = f"{HANG}: ranks {{ranks}} start different operations on the communicator of ranks 0, 1 in group {{group}}"
REFUSED = "MS520 {backend} refuses this {call}"
MESSAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "pair-communicator": (WAIT, {}),
    "creation-blocks": (WAIT, {}),
    "eager-communicator": (WAIT, {}),
    "batch": (WAIT.replace("0, 1", "0, 1, 2"), {}),
    "queue-order": (WAIT, {}),
    "collective-order": (DIFFER, {"group": "default_pg"}),
    "group-order": (DIFFER, {"group": "default"}),
    "synchronization": (WAIT, {}),
    "device-tensors": (f"{REFUSED}: the tensor is in host memory", {"call": "all_reduce"}),
    "types": (f"{REFUSED}: complex32 is not a supported data type", {"call": "broadcast"}),
    "reduced-types": (f"{REFUSED}: float8_e5m2 is not a supported data type", {"call": "all_reduce"}),
    "message-size": (DIFFER, {"group": "default_pg"}),
    "known-source": (f"{REFUSED}: it has no source rank", {"call": "recv"}),
    "overlapping-buffers": (f"{REFUSED}: input and output overlap", {"call": "all_to_all_single"}),
    "all-to-all-splits": (f"{REFUSED}: [1, 2] does not split 4 rows among 2 ranks", {"call": "all_to_all_single"}),
    "all-to-all-sizes": (DIFFER, {"group": "default_pg"}),
    "split-group": (f"{REFUSED}: {{no_split}}", {"call": "split_group"}),
    "split-order": (DIFFER, {"group": "default_pg"}),
    "functional-collectives": (DIFFER, {"group": "default_pg"}),
}


OTHERS = {"nccl-rules-eager": ("eager-communicator", "split-order"), "hccl-rules": ("types", "reduced-types")}
"""Rules that differ from those of NCCL; the default run has these, and all rules of NCCL."""


@pytest.mark.parametrize(
    ("rules", "rule"),
    [
        pytest.param(rules, rule, marks=[] if rule in OTHERS.get(rules, (rule,)) else [pytest.mark.long])
        for rules in NAMES
        for rule in follows(rules)
    ],
)
def test_a_program_that_breaks_a_rule_is_reported_with_its_lines(pool: WorkerPool, rules: str, rule: str) -> None:
    with pytest.raises(MindSpeedError) as raised:
        launch(pool, rules, program("breaks", rule), ranks=3 if rule == "batch" else 2)
    (problem,) = raised.value.problems
    text, values = MESSAGES[rule]
    backend = "HCCL" if rules == "hccl-rules" else "NCCL"
    first = str(problem).splitlines()[0]
    values |= {"backend": backend, "no_split": rule_set(rules).no_split}
    assert first in {text.format(ranks=ranks, **values) for ranks in ("0 and 1", "1 and 0")}
    assert ("exchange" if rule == "batch" else program("breaks", rule)) in str(problem)


def methods() -> bool:
    """Whether the methods of process groups are torch's own."""
    return all(type(vars(dist.ProcessGroup)[name]).__name__ == "instancemethod" for name in ("barrier", "allreduce"))


def test_a_method_of_a_process_group_is_refused_and_restored(pool: WorkerPool) -> None:
    with pytest.raises(MindSpeedError) as raised:
        launch(pool, "nccl-rules", talks_round_torch.__name__)
    (problem,) = raised.value.problems
    assert (problem.code, problem.message) == (
        "MS520",
        "allreduce is called on a process group directly, so the rules of NCCL cannot be checked",
    )
    launch(pool, "nccl-rules", obeys_collective_order.__name__)
    assert pool.call(methods, 2) == [True, True]


def agreed() -> list[float]:
    from mindspeed.workbench.training.batches import largest

    return largest(0.5, dist.get_rank())


def test_the_trainer_reduces_types_that_hccl_has(pool: WorkerPool) -> None:
    plan = mindspeed.plan(platform="cpu", settings={"device-emulation": {"backend": "hccl-rules"}})
    assert pool.call(agreed, 2, plan=plan) == [[0.5, 1.0]] * 2


def test_an_unknown_set_of_rules_is_refused() -> None:
    with pytest.raises(MindSpeedError, match="MS3"):
        mindspeed.plan(platform="cpu", settings={"device-emulation": {"backend": "mpi-rules"}})


def test_every_rule_has_a_source() -> None:
    assert all(rule.nccl or rule.hccl for rule in RULES)
    assert {rule.name for rule in RULES} == set(MESSAGES)
