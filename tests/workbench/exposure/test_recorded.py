"""The simulation of a recorded program takes as long as the run on an emulated link from which it was recorded."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mindspeed
from benchmarks._linear_layers import SECONDS, SENT, SHARE, WIDTH, launched_late, seconds_of
from mindspeed.features.coc import products as coc
from mindspeed.features.device_emulation import collective_log
from mindspeed.tensor_parallel.linear import plain_weight_gradient
from mindspeed.workbench.exposure.machines import Link, Topology
from mindspeed.workbench.exposure.programs import Computation, PeerTransfer, Post, Wait
from mindspeed.workbench.exposure.recorded import programs_of_steps
from mindspeed.workbench.exposure.simulator import simulate
from mindspeed.workbench.verification.pool import WorkerPool


def measured() -> list[float]:
    """The seconds of layers in parts, on an emulated link: each as it is, and with each collective waited for at once."""
    group, ranks, found = dist.group.WORLD, dist.get_world_size(), []
    share, whole, weight = torch.ones(SHARE, WIDTH), torch.ones(SHARE * ranks, WIDTH), torch.ones(WIDTH, WIDTH)
    for parts in (2, 4, 8):
        column, row = (cls(group, {SHARE: parts}.__getitem__) for cls in (coc.GatheredProducts, coc.ScatteredProducts))
        runs: list[Any] = [
            partial(column.forward, share, weight),
            partial(row.forward, whole, weight),
            partial(column.gradients, whole, share, weight, plain_weight_gradient),
        ]
        for run in runs:
            with collective_log.whole_step():
                found.append(seconds_of(run, whole.numel() * WIDTH, SECONDS, SENT))
            with launched_late(), collective_log.whole_step():
                found.append(seconds_of(run, whole.numel() * WIDTH, SECONDS, SENT))
    return found


@pytest.mark.budget(6)
def test_a_recorded_program_takes_as_long_as_on_the_emulated_link(pool: WorkerPool, tmp_path: Path) -> None:
    log = {"link_gbps": 1.0, "collective_log": str(tmp_path / "{rank}"), "log_steps": True}
    plan = mindspeed.plan(features=[], platform="cpu", settings={"device-emulation": log})
    seconds = pool.call(measured, 2, plan=plan)[0]
    steps = [programs_of_steps((tmp_path / str(rank)).read_text().splitlines(), rank) for rank in range(2)]
    flops = 2 * (2 * SHARE * WIDTH * WIDTH) / SECONDS
    machine = Topology("emulated", 2, Link(SENT / SECONDS), Link(1.0), Link(1.0), flops)
    found = [simulate(dict(enumerate(programs)), machine).makespan for programs in zip(*steps, strict=True)]
    assert found == pytest.approx(seconds)


def test_a_program_has_the_parts_of_a_batch_and_the_copies_of_the_host() -> None:
    lines = [
        '{"event": "launch", "id": 0, "kind": "all_reduce", "group": "tp", "communicator": "1", "bytes": 8}',
        '{"event": "communicator", "communicator": "2", "group": "cp", "ranks": [3, 5]}',
        '{"event": "step"}',
        '{"event": "wait", "id": 0, "blocked": 0}',
        '{"event": "launch", "id": 1, "kind": "isend", "group": "cp", "communicator": "2", "bytes": 4, "peer": 5}',
        '{"event": "launch", "id": 1, "kind": "irecv", "group": "cp", "communicator": "2", "bytes": 4, "peer": 5}',
        '{"event": "kernel", "op": "aten.mm", "flops": 16}',
        '{"event": "use", "id": 1, "op": "aten.add", "waited": false}',
        '{"event": "wait", "id": 1, "blocked": 0}',
        '{"event": "launch", "id": 2, "kind": "offload", "group": "host", "bytes": 6}',
    ]
    (program,) = programs_of_steps(lines, 3)
    assert program == [
        Post(1, "isend", "2", (3, 5), (PeerTransfer("send", 4, 5), PeerTransfer("recv", 4, 5))),
        Computation("aten.mm", 16),
        Wait(1),
        Post(2, "offload", "host offload", (3,), (PeerTransfer("all", 6),)),
    ]
