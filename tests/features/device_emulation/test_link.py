"""The emulated link of the CPU platform."""

import time

import pytest
import torch
import torch.distributed as dist

import mindspeed
from mindspeed.plugins import MindSpeedError
from mindspeed.workbench.verification.pool import WorkerPool

MS = 30


def moments() -> tuple[list[float], list[float]]:
    """The seconds after which two launches returned, both waits, and a synchronous call; and what was summed."""
    tensors = [torch.full((1000,), float(number)) for number in range(3)]
    start, seconds = time.perf_counter(), []

    def note() -> None:
        seconds.append(time.perf_counter() - start)

    handles = [dist.all_reduce(tensor, async_op=True) for tensor in tensors[:2]]
    note()
    for handle in handles:
        handle.wait()
        note()
    dist.all_reduce(tensors[2])
    note()
    return seconds, [tensor[0].item() for tensor in tensors]


def test_a_transfer_is_done_some_time_after_its_launch_and_those_of_a_group_one_after_another(pool: WorkerPool) -> None:
    settings = {"device-emulation": {"link_ms": MS, "poison": True}}
    for (launched, *done), sums in pool.call(moments, 2, plan=mindspeed.plan(platform="cpu", settings=settings)):
        assert sums == [0.0, 2.0, 4.0]
        assert launched < done[0]
        assert [seconds >= (number + 1) * MS / 1e3 for number, seconds in enumerate(done)] == [True] * 3


def test_bytes_take_time_by_the_speed_of_the_link(pool: WorkerPool) -> None:
    sent = 4000  # of 1000 fp32 numbers in an all-reduce of two ranks
    settings = {"device-emulation": {"link_gbps": sent * 8 / (MS / 1e3) / 1e9}}
    for (_, *done), _ in pool.call(moments, 2, plan=mindspeed.plan(platform="cpu", settings=settings)):
        assert all(seconds >= 0.999 * (number + 1) * MS / 1e3 for number, seconds in enumerate(done))


def test_a_link_is_not_faster_than_none() -> None:
    with pytest.raises(MindSpeedError) as error:
        mindspeed.plan(platform="cpu", settings={"device-emulation": {"link_ms": -1}})
    (problem,) = error.value.problems
    assert "device-emulation.link_ms" in problem.message
