"""``mindspeed preflight --between-nodes``: planted differences and slow pairs are named; a real job of ranks is measured."""

import json
import os
import socket
import subprocess
import sys
from collections import Counter
from itertools import combinations

import pytest

from mindspeed.workbench.diagnostics import between_nodes
from mindspeed.workbench.diagnostics.between_nodes import NodeFacts, PairBandwidth, rounds

COMMAND = [sys.executable, "-m", "mindspeed", "preflight", "--between-nodes", "--mib", "1"]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 16])
def test_each_two_ranks_meet_once_and_no_rank_has_two_partners(size):
    played = list(rounds(size))
    for pairs in played:
        assert max(Counter(rank for pair in pairs for rank in pair).values(), default=1) == 1
    assert sorted(pair for pairs in played for pair in pairs) == list(combinations(range(size), 2))


def nodes(count: int, **of_last: object) -> list[NodeFacts]:
    values = {"host": "n{}", "equal": {"driver": "24.1", "devices": "8 npu"}, "shared_memory": 16.0, "clock": 100.0}
    made = [NodeFacts(**{**values, "host": f"n{rank}"}) for rank in range(count - 1)]
    return [*made, NodeFacts(**{**values, "host": f"n{count - 1}", **of_last})]


def test_a_node_with_another_driver_or_clock_is_named():
    other = nodes(4, equal={"driver": "23.0", "devices": "8 npu"}, clock=103.5, shared_memory=0.1)
    checks = [*between_nodes._equal_facts(other), between_nodes._clocks(other), between_nodes._shared_memory(other, 1.0)]
    assert {check.name: check.found for check in checks if not check.passed} == {
        "nodes-driver": "rank 3 on n3: 23.0",
        "nodes-clock": "rank 3 on n3: +3.5 s",
        "nodes-shared-memory": "rank 3 on n3: 0.1 GiB",
    }
    assert [check.found for check in between_nodes._equal_facts(nodes(4))] == ["24.1 on all 4", "8 npu on all 4"]


def test_a_slow_node_is_named_once_and_a_slow_pair_by_its_two_nodes():
    def checked(slow):
        pairs = [PairBandwidth(a, b, 5.0 if slow(a, b) else 20.0) for a, b in combinations(range(6), 2)]
        [check] = between_nodes._bandwidth(nodes(6), pairs)
        return check

    assert checked(lambda a, b: False).passed
    node, pair = checked(lambda a, b: b == 5), checked(lambda a, b: (a, b) == (1, 4))
    assert node.found == "rank 5 on n5 is slow with 5 of 5 others; median 20.00 GB/s, least 5.00 GB/s of 15 pairs"
    assert pair.found.startswith("rank 1 on n1 and rank 4 on n4: 5.00 GB/s; median 20.00 GB/s")
    assert not node.passed
    assert not pair.passed


def started(ranks: int, of_job: int, *options: str, **variables: str) -> list[subprocess.CompletedProcess[str]]:
    """Run these ranks of a job; the variables are those of the last one alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {
        **os.environ,
        "WORLD_SIZE": str(of_job),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "MINDSPEED_PLATFORM": "cpu",
    }
    processes = [
        subprocess.Popen(
            [*COMMAND, *options],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank), **(variables if rank == ranks - 1 else {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    return [subprocess.CompletedProcess(COMMAND, p.returncode, *output) for p, output in zip(processes, outputs, strict=True)]


@pytest.mark.long
def test_three_ranks_find_the_variable_in_which_one_differs():
    first, *others = started(3, 3, "--json", NCCL_ALGO="Tree")
    assert [(other.returncode, other.stdout) for other in others] == [(0, "")] * 2
    checks = {check["name"]: check for check in json.loads(first.stdout)["checks"]}
    assert checks["nodes-NCCL_ALGO"]["found"] == f"rank 2 on {socket.gethostname()}: Tree"
    assert checks["nodes-torch"]["passed"]
    assert "of 3 pairs" in checks["bandwidth-within-nodes"]["found"]
    assert first.returncode == 3


@pytest.mark.long
def test_a_process_that_does_not_come_is_told_within_the_time_limit():
    [alone] = started(1, 2, "--wait", "2")
    assert alone.returncode == 1
    assert alone.stderr.startswith(f"MS611 rank 0 on {socket.gethostname()} could not meet")
