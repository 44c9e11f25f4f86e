"""The coordinator of ranks under the rules of a backend, without processes."""

from mindspeed.features.device_emulation.coordinator import Coordinator, RankMessage
from mindspeed.features.device_emulation.queues import Communicator, Operation, Part
from mindspeed.plugins import Problem

ALL = Communicator("0", "tp", (0, 1))
SUM, COPY = Part("all", None, ("all_reduce", 4)), Part("all", None, ("broadcast", 4))


def operation(rank: int, number: int, *parts: Part, communicator: Communicator = ALL) -> Operation:
    return Operation(rank, number, parts[0].content[0].__str__(), communicator, parts, f"job.py:{number}")


def wait(*numbers: int, started: tuple[Operation, ...] = ()) -> RankMessage:
    return RankMessage(started, True, numbers, "job.py:9")


def message(direction: str, peer: int, size: int = 4) -> Part:
    return Part(direction, peer, ("float32", size))  # type: ignore[arg-type]


def test_a_rank_continues_when_its_operation_is_complete_and_not_before() -> None:
    coordinator = Coordinator("NCCL", 2)
    coordinator.receive(0, wait(0, started=(operation(0, 0, SUM),)))
    assert coordinator.ready() == []
    coordinator.receive(1, RankMessage((operation(1, 0, SUM),)))
    assert coordinator.ready() == [0]
    assert coordinator.problem is None


def test_an_operation_is_held_by_the_one_ahead_of_it_on_either_side() -> None:
    coordinator = Coordinator("NCCL", 2)
    coordinator.receive(0, RankMessage((operation(0, 0, message("recv", 1)), operation(0, 1, message("send", 1)))))
    coordinator.receive(1, wait(0, started=(operation(1, 0, message("recv", 0)), operation(1, 1, message("send", 0)))))
    assert coordinator.ready() == []
    coordinator.receive(0, wait(1))
    assert coordinator.ready() == [1, 0]
    assert coordinator.problem is not None
    assert coordinator.problem.chain == (
        "rank 0 waits for float32 at job.py:1, which it waits for at job.py:9",
        "  ahead of it in the queue of the communicator of ranks 0, 1 in group tp: float32 at job.py:0",
        "  on rank 1 its part, float32 at job.py:1, is behind float32 at job.py:0",
        "rank 1 waits for float32 at job.py:0, which it waits for at job.py:9",
        "  on rank 0 its part, float32 at job.py:1, is behind float32 at job.py:0",
    )


def test_the_order_within_a_batch_does_not_matter() -> None:
    coordinator = Coordinator("NCCL", 2)
    for rank in (0, 1):
        parts = message("recv", 1 - rank), message("send", 1 - rank), message("send", 1 - rank, 2), message("recv", 1 - rank, 2)
        coordinator.receive(rank, wait(0, started=(operation(rank, 0, *parts),)))
    assert coordinator.ready() == [0, 1]
    assert coordinator.problem is None


def test_collectives_that_differ_are_reported_to_both_ranks() -> None:
    coordinator = Coordinator("HCCL", 2)
    coordinator.receive(0, wait(0, started=(operation(0, 0, SUM),)))
    coordinator.receive(1, wait(0, started=(operation(1, 0, COPY),)))
    assert coordinator.ready() == [0, 1]
    assert coordinator.problem is not None
    assert coordinator.problem.message == (
        "with the rules of HCCL the job hangs: ranks 0 and 1 start different operations on the communicator of ranks 0, 1 in "
        "group tp"
    )


def test_a_rank_that_ends_in_the_middle_is_named() -> None:
    coordinator = Coordinator("NCCL", 2)
    coordinator.receive(0, wait(0, started=(operation(0, 0, SUM),)))
    coordinator.lose(1)
    assert coordinator.ready() == [0]
    assert coordinator.problem is not None
    assert coordinator.problem.chain == (
        "rank 0 waits for all_reduce at job.py:0, which it waits for at job.py:9",
        "  rank 1 has not started its part",
        "rank 1 ended early",
    )


def test_the_other_ranks_give_the_reason_of_a_rank_that_fails() -> None:
    coordinator, problem = Coordinator("NCCL", 2), Problem("MS520", "NCCL refuses this all_reduce")
    coordinator.receive(0, wait(0, started=(operation(0, 0, SUM),)))
    coordinator.receive(1, RankMessage(ends=True, problem=problem))
    assert coordinator.ready() == [0]
    assert coordinator.problem is problem


def test_a_synchronization_waits_for_all_operations_of_its_rank() -> None:
    coordinator = Coordinator("NCCL", 2)
    other = ALL._replace(name="1", group="other")
    coordinator.receive(0, RankMessage((operation(0, 0, SUM), operation(0, 1, SUM, communicator=other))))
    coordinator.receive(0, RankMessage(waits=True, numbers=None, site="job.py:9"))
    coordinator.receive(1, RankMessage((operation(1, 0, SUM),)))
    assert coordinator.ready() == []
    coordinator.receive(1, RankMessage((operation(1, 1, SUM, communicator=other),)))
    assert coordinator.ready() == [0]
