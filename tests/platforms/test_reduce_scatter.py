"""Reduce-scatter of the cpu platform: torch's result to the bit, for half of gloo's bytes."""

from inspect import unwrap
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager

import mindspeed
from benchmarks._sockets import bytes_on_sockets
from mindspeed.platforms.cpu_reduce_scatter import FutureWork
from mindspeed.workbench.verification.pool import WorkerPool

LONG = pytest.mark.long
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int8, torch.uint8)
SIZES = (0, 1, 7, 20001, 4096)
"""The last is one at which gloo's ring cuts where the parts of more than two ranks are cut, so that its order is ours."""
ROUNDING = {torch.float64: 1e-14, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
ALLOWED = 4096
"""Bytes of gloo's messages about a collective, whatever its size."""


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=LONG), pytest.param(4, marks=LONG)], ids="{} ranks".format)
def found(pool: WorkerPool, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What every rank found, of one activation of the platform."""
    results: list[dict[str, Any]] = pool.call(measured, request.param, plan=mindspeed.plan(features=[], platform="cpu"))
    return results


def measured() -> dict[str, Any]:
    return {"differing": differing(), "sent": sent_bytes(), "others": others()}


def given(count: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Numbers of this rank, which rounding does not spare."""
    generator = torch.Generator().manual_seed(dist.get_rank() + 10 * seed)
    numbers = torch.randn(count, generator=generator)
    return numbers.to(dtype) if dtype.is_floating_point else (numbers * 5).to(torch.int8).to(dtype)


def stock(output: Tensor, whole: Tensor, op: Any) -> Tensor:
    unwrap(dist.reduce_scatter_tensor)(output, whole, op)
    return output


def differing() -> list[str]:
    """The cases in which a spelling gives other bits than torch's function, or other numbers where the order may differ."""
    world, wrong = dist.get_world_size(), []
    cases = [(dtype, op) for dtype in FLOATS for op in ("SUM", "AVG", "MIN", "MAX", "PRODUCT")]
    cases += [(dtype, op) for dtype in INTEGERS for op in ("SUM", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR")]
    cases += [(torch.bool, "SUM"), (torch.complex64, "SUM")]
    for dtype, name in cases:
        op = getattr(dist.ReduceOp, name)
        for size in SIZES:
            whole = given(world * size, dtype)
            wanted = stock(torch.empty(size, dtype=dtype), whole.clone(), op)
            results = [torch.empty_like(wanted) for _ in range(4)]
            dist.reduce_scatter_tensor(results[0], whole, op)
            dist.reduce_scatter(results[1], list(whole.chunk(world)) if size else [whole] * world, dist.ReduceOp(op))
            dist.reduce_scatter_tensor(results[2], whole, op=op, async_op=True).wait()
            with _coalescing_manager():
                dist.reduce_scatter_tensor(results[3], whole, op)
            same_order = world == 2 or size == SIZES[-1] or not dtype.is_floating_point
            if not all(torch.equal(result, wanted if same_order else results[0]) for result in results):
                wrong.append(f"{dtype} {name} {size}")
            if not torch.allclose(results[0], wanted, rtol=ROUNDING.get(dtype, 0.0), atol=ROUNDING.get(dtype, 0.0)):
                wrong.append(f"{dtype} {name} {size}")
    return wrong


@pytest.mark.budget(12)
def test_every_spelling_gives_the_bits_of_torch_for_every_type_operation_and_size(found: list[dict[str, Any]]) -> None:
    assert [rank["differing"] for rank in found] == [[]] * len(found)


def sent_bytes() -> dict[str, int]:
    """Bytes that this rank must send, and those that it sends by spelling and with torch's function."""
    world, size = dist.get_world_size(), 1 << 18
    whole, output = given(world * size, torch.float32), torch.empty(size)

    def coalesced() -> None:
        with _coalescing_manager(async_ops=True) as held:
            dist.reduce_scatter_tensor(output[: size // 2], whole[: world * size // 2], async_op=True)
            dist.reduce_scatter_tensor(output[size // 2 :], whole[world * size // 2 :], async_op=True)
        held.wait()

    spellings = {
        "tensor": lambda: dist.reduce_scatter_tensor(output, whole),
        "list": lambda: dist.reduce_scatter(output, list(whole.chunk(world))),
        "base": lambda: dist.distributed_c10d._reduce_scatter_base(output, whole),
        "coalesced": coalesced,
        "torch": lambda: stock(output, whole, dist.ReduceOp.SUM),
        "all-gather": lambda: dist.all_gather_into_tensor(whole, output),
        "all-gather list": lambda: dist.all_gather(list(whole.chunk(world)), output),
    }
    sent = {"needed": (world - 1) * output.nbytes}
    for name, reduce in spellings.items():
        reduce()
        dist.barrier()
        before = bytes_on_sockets()
        reduce()
        dist.barrier()
        sent[name] = bytes_on_sockets() - before
    return sent


@pytest.mark.budget(12)
def test_a_rank_sends_each_other_rank_its_part_and_no_more(found: list[dict[str, Any]]) -> None:
    for rank in found:
        needed = rank["sent"]["needed"]
        assert rank["sent"]["torch"] > 1.9 * needed  # else this replacement has nothing to do
        for name in ("tensor", "list", "base", "coalesced", "all-gather", "all-gather list"):
            assert needed <= rank["sent"][name] <= 1.01 * needed + ALLOWED, name


def others() -> dict[str, Any]:
    """What is left: an output in its own input, parts of different shapes, a future, one without end, gradients, errors."""
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = torch.arange(4.0 * world)
    mine = whole[4 * rank :][:4]
    dist.reduce_scatter_tensor(mine, whole)
    parts = [torch.full((n + 1, 2), float(n)) for n in range(world)]
    uneven = torch.empty(rank + 1, 2)
    dist.reduce_scatter(uneven, parts)
    total = torch.empty(3)
    work = dist.reduce_scatter_tensor(total, torch.ones(3 * world), async_op=True)
    ours, value = isinstance(work, FutureWork), work.get_future().wait()
    leaf = torch.zeros(2, requires_grad=True)
    kept = leaf * 1.0
    version = kept._version
    dist.reduce_scatter_tensor(kept, torch.ones(2 * world, requires_grad=True))
    of_views = torch.empty(3, 2)
    dist.reduce_scatter(of_views, [torch.arange(6.0).view(2, 3).t()] * world)
    messages = []
    for output, tensor in ((torch.empty(3), torch.ones(4 * world)), (torch.empty(3), torch.ones(3 * world).double())):
        try:
            dist.reduce_scatter_tensor(output, tensor)
        except RuntimeError as error:
            messages.append("Check failed" in str(error))
    (alone,) = [dist.new_group([n]) for n in range(world)][rank : rank + 1]
    single = torch.empty(2)
    dist.reduce_scatter_tensor(single, torch.ones(2), group=alone)
    return {
        "into its own input": mine.tolist(),
        "uneven": uneven.tolist(),
        "future": [ours, work.is_completed(), torch.equal(value[0], total), total.tolist()],
        "version": kept._version - version,
        "of_views": of_views.tolist(),
        "errors": messages,
        "alone": single.tolist(),
    }


@pytest.mark.budget(12)
def test_outputs_of_every_kind_are_written_and_errors_stay_torchs(found: list[dict[str, Any]]) -> None:
    world = len(found)
    for rank, results in enumerate(found):
        assert results["others"] == {
            "into its own input": [world * (4.0 * rank + n) for n in range(4)],
            "uneven": [[float(rank * world)] * 2] * (rank + 1),
            "future": [True, True, True, [float(world)] * 3],
            "version": 0,
            "of_views": (world * torch.arange(6.0).view(2, 3).t()).tolist(),
            "errors": [True, True],
            "alone": [1.0, 1.0],
        }


def test_a_failed_exchange_is_raised_at_the_wait() -> None:
    future: Any = torch.futures.Future()
    handle = FutureWork(future.then(lambda done: done.value()))
    future.set_exception(RuntimeError("connection closed by peer"))
    with pytest.raises(RuntimeError, match="connection closed by peer"):
        handle.wait()
