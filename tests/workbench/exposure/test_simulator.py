"""The simulator gives what is known otherwise: of rings, of pipelines, of an emulated link; and it finds who waits for whom."""

import pytest

from benchmarks._ring_program import RingJob, ring_programs
from mindspeed.pipeline.operations import Costs, PipelineShape
from mindspeed.pipeline.search import named
from mindspeed.pipeline.simulator import judge
from mindspeed.workbench.exposure.machines import NODES, PUBLISHED, Link, Topology
from mindspeed.workbench.exposure.pipelines import pipeline_programs
from mindspeed.workbench.exposure.programs import Computation, PeerTransfer, Post, Wait, at_once
from mindspeed.workbench.exposure.simulator import StuckError, simulate

UNIT = Topology("unit", 8, Link(1.0), Link(0.1), Link(2.0), 1.0)
"""A byte within a node takes 1, between nodes 10, and to the host 0.5; so does a floating-point operation take 1."""


def given(job: RingJob) -> Topology:
    """Where a block takes 1 to compute, 0.3 to the next rank of a node, and 3 to one of another node."""
    program = ring_programs(job, "forward")[0]
    work = sum(event.flops for event in program if isinstance(event, Computation)) / job.ranks
    size = next(event.parts[0].bytes for event in program if isinstance(event, Post))
    return Topology("given", 8, Link(size / 0.3), Link(size / 3), Link(1.0), work)


@pytest.mark.parametrize(
    ("window", "shared", "forward", "backward"),
    [(1, False, 94, 279), (8, True, 38.9, 104.2), (8, False, 32, 84.75)],
    ids=["plain", "one communicator", "two communicators"],
)
def test_a_double_ring_hides_its_outer_hops_with_a_communicator_of_their_own(
    window: int, shared: bool, forward: float, backward: float
) -> None:
    """Backward computes 80; the gradients of the last window go home behind half of the own block."""
    job = RingJob(32, window, shared, causal=False)
    machine = given(job)
    assert simulate(ring_programs(job, "forward"), machine).makespan == pytest.approx(forward)
    assert simulate(ring_programs(job, "backward"), machine).makespan == pytest.approx(backward)


@pytest.mark.parametrize("costs", [Costs(), Costs(10, 13, 8)], ids=["equal", "unequal"])
@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize(
    ("name", "vpp"), [("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-h1", 2), ("fastest", 1), ("zb-v", 2)]
)
def test_pipelines_have_the_spans_of_the_schedule_simulator(name: str, vpp: int, pp: int, costs: Costs) -> None:
    shape = PipelineShape(pp, vpp, 2 * pp, "v" if name == "zb-v" else "loop")
    schedule = named(name, shape, costs)
    expected, found = judge(schedule, costs), simulate(pipeline_programs(schedule, costs), UNIT)
    for rank, spans in enumerate(expected.spans):
        kernels = [(one.name, one.begin, one.end) for one in found.kernels if one.rank == rank]
        assert kernels == [(str(op), begin, end) for op, begin, end in spans]
    work = sum(kernel.seconds for kernel in found.kernels)
    assert 1 - work / (found.makespan * pp) == pytest.approx(expected.bubble)


def message(number: int, communicator: str, to: int, source: int, size: float = 1.0) -> Post:
    return Post(number, "exchange", communicator, (0, 1), (PeerTransfer("send", size, to), PeerTransfer("recv", size, source)))


def test_operations_of_one_communicator_run_one_after_another_and_share_no_time_with_those_of_the_same_link() -> None:
    for second in ("a", "b"):
        program = {rank: [message(1, "a", 1 - rank, 1 - rank), message(2, second, 1 - rank, 1 - rank)] for rank in (0, 1)}
        assert simulate(program, UNIT).makespan == 2


def test_a_message_within_a_node_overlaps_with_one_between_nodes_unless_they_share_a_communicator() -> None:
    def program(rank: int, communicator: str) -> list[Post]:
        far, near = (rank + 8) % 16, rank ^ 1
        ranks = tuple(range(16))
        return [
            Post(number, "exchange", name, ranks, (PeerTransfer("send", 1, peer), PeerTransfer("recv", 1, peer)))
            for number, (name, peer) in enumerate(((communicator, far), ("a", near)))
        ]

    for communicator, expected in (("a", 11), ("b", 10)):
        assert simulate({rank: program(rank, communicator) for rank in range(16)}, UNIT).makespan == expected


def test_a_wait_is_exposed_for_as_long_as_the_kernels_before_it_do_not_hide_it() -> None:
    gather = Post(1, "all_gather", "tp", (0, 1), (PeerTransfer("all", 4),))
    program = [gather, Computation("product", 1.5), Wait(1), Computation("product", 1)]
    found = simulate({0: program, 1: program}, UNIT)
    assert (found.exposed(0), found.transferred(0), found.makespan) == (0.5, 2, 3)
    assert simulate(dict.fromkeys((0, 1), at_once(program)), UNIT).exposed(0) == 2


def test_collectives_that_queue_run_one_after_another_on_all_ranks() -> None:
    gathers = [Post(number, "all_gather", "tp", (0, 1), (PeerTransfer("all", 4),)) for number in range(3)]
    programs = {0: [*gathers, Wait(2)], 1: [gathers[0], Computation("product", 5), *gathers[1:], Wait(2)]}
    found = simulate(programs, UNIT)
    assert [one.end for one in found.transfers if one.rank == 0] == [2, 7, 9]


def test_a_rank_without_a_program_is_ready() -> None:
    program = [Computation("product", 1), message(1, "ring", 1, 1), Wait(1)]
    assert simulate({0: program}, UNIT).makespan == 2


def test_copies_to_and_from_the_host_overlap_with_kernels_and_with_each_other() -> None:
    copies = [Post(n, kind, kind, (0,), (PeerTransfer("all", 2),)) for n, kind in enumerate(("offload", "fetch"))]
    assert simulate({0: [*copies, Computation("product", 1), Wait(0), Wait(1)]}, UNIT).makespan == 1


def test_the_ranks_that_wait_for_one_another_are_named() -> None:
    programs = {
        rank: [
            Post(1, "receive", "pair", (0, 1), (PeerTransfer("recv", 1, 1 - rank),)),
            Wait(1),
            message(2, "pair", 1 - rank, 1 - rank),
        ]
        for rank in (0, 1)
    }
    with pytest.raises(StuckError) as error:
        simulate(programs, UNIT)
    assert str(error.value) == (
        "ranks wait for one another: rank 0 at Wait(number=1, stream='compute'), rank 1 at Wait(number=1, stream='compute')"
    )


@pytest.mark.parametrize(("kind", "expected"), [("all_gather", 15), ("all_reduce", 30), ("all_to_all", 80)])
def test_a_collective_over_two_nodes_takes_as_long_as_on_its_slower_links(kind: str, expected: float) -> None:
    """Of 16 bytes, a node fetches 8 over the links of its 8 ranks; in an all-to-all each rank sends 8 to the other node."""
    assert UNIT.collective(Post(1, kind, "all", tuple(range(16)), (PeerTransfer("all", 16),))) == pytest.approx(expected)


def test_published_machines_have_128_ranks_in_16_nodes_or_in_one() -> None:
    assert NODES.links_of(range(128)) == ("within", "between")
    assert [machine.links_of(range(128)) for machine in PUBLISHED[1:]] == [("within",)]
