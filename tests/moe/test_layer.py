"""One layer on two ranks: equal bits of all ways to compute it, what it keeps, sends, and which transfers are exposed."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import _moe_layer as layer
from benchmarks._moe_layer import Outcome, Shape, plan_of
from mindspeed.features.expert_parallel import choice
from mindspeed.workbench.verification.pool import WorkerPool
from tests.moe import closed_forms

LEVEL1 = {"moe-zero-memory": {"level": "level1"}}
PARTS = {"moe-alltoall-overlap": {"parts": 4}}


OVERLAPS = ["moe-alltoall-overlap", "moe-allgather-overlap"]


def run(shape: Shape) -> Outcome:
    return layer.run(shape)


def run_eagerly(shape: Shape) -> Outcome:
    return layer.run_eagerly(shape)


def run_with_faults(shape: Shape) -> dict[str, list[Tensor]]:
    """The results with each fault, and with none."""
    from tests.moe.faults import FAULTS

    values = {"": layer.run(shape).values}
    for name, fault in FAULTS.items():
        with fault():
            values[name] = layer.run(shape).values
    return values


def waits_that_matter(shape: Shape) -> list[bool]:
    """Whether results differ where each wait of a forward and backward pass is left out. The platform must poison."""
    from mindspeed.features.device_emulation import poison
    from tests.moe.faults import without_wait

    with without_wait(-1) as ended:
        expected = layer.run(shape).values
    matter = []
    for number in range(len(ended) // 2):  # the other half is that of the second micro-batch
        with without_wait(number):
            try:
                values = layer.run(shape).values
            except (RuntimeError, ValueError, TypeError, OverflowError):  # sizes that are no sizes
                values = []
        matter.append(not same(values, expected))
        poison._pending.clear()
    return matter


def reads(shape: Shape) -> tuple[list[str], list[str]]:
    """Reads of the device on the host in a forward and in a backward pass of a layer."""
    from mindspeed.platforms.host_reads import host_reads

    moe = layer.build(shape, torch.float32)
    x = torch.randn(shape.tokens, 1, shape.hidden, device="cuda").requires_grad_()
    with host_reads() as forward:
        y = moe(x)[0]
    with host_reads() as backward:
        y.sum().backward()
    return [str(read) for read in forward], [str(read) for read in backward]


def flops(shape: Shape) -> tuple[int, int]:
    """Rows that a rank's experts get, and floating-point operations of their products in a forward and backward pass."""
    from mindspeed.moe import products

    moe = layer.build(shape, torch.float32)
    x = torch.randn(shape.tokens, 1, shape.hidden).requires_grad_()
    original, seen = products.npu_gmm, []

    def counted(x: Tensor, weight: Tensor, **more: Any) -> Tensor:
        seen.append((len(x), 2 * x.numel() * weight.shape[-1]))
        return original(x, weight, **more)

    with patch.object(products, "npu_gmm", counted):
        moe(x)[0].sum().backward()
    return seen[0][0], sum(count for _, count in seen)


def evaluate(shape: Shape, mode: str) -> tuple[Tensor, int]:
    """The answers of a layer that is evaluated, and the bytes that autograd keeps of it."""
    moe = layer.build(shape, torch.float32).eval()
    draw = torch.Generator("cpu").manual_seed(dist.get_rank())
    x = torch.randn(shape.tokens, 1, shape.hidden, generator=draw)
    with getattr(torch, mode)(), layer.Kept(moe) as kept:
        y = moe(x)[0]
    return y.clone(), kept.bytes


def fires(shape: Shape) -> tuple[int, int]:
    """How often a rank recomputed its experts, of how many calls, in two micro-batches."""
    from mindspeed.plugins import active_feature

    layer.run(shape)
    feature = active_feature("moe-adaptive-recompute")
    return feature.fires, feature.calls


def shared_experts_hide_transfers(shape: Shape) -> bool:
    return bool(layer.build(shape, torch.float32).shared_expert_overlap)


def outcomes(pool: WorkerPool, shape: Shape, *features: str, settings: Any = None, ranks: int = 2) -> list[Outcome]:
    """The outcome of every rank."""
    return pool.call(run, ranks, shape, plan=plan_of(*features, settings=settings, ep=ranks))


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def close(some: list[Tensor], others: list[Tensor]) -> bool:
    pairs = zip(some, others, strict=True)
    return all(a.shape == b.shape and float(torch.linalg.norm(a - b)) <= 1e-5 * float(torch.linalg.norm(b)) for a, b in pairs)


def equal(some: list[Outcome], others: list[Outcome]) -> bool:
    return all(same(x.values, y.values) for x, y in zip(some, others, strict=True))


@pytest.mark.cover(1, because="test_parity.py has both dispatchers with uneven loads")
@pytest.mark.long
@pytest.mark.parametrize("feature", OVERLAPS)
@pytest.mark.parametrize("hot", [0.0, 100.0], ids=["uneven", "a starved rank"])
def test_a_layer_gives_what_megatrons_dispatcher_gives_and_a_planted_fault_is_seen(
    pool: WorkerPool, feature: str, hot: float
) -> None:
    shape = Shape(hot=hot, shared=96)
    dispatcher = {"expert-parallel": {"dispatcher": feature.split("-")[1]}}
    expected = outcomes(pool, shape, "moe-grouped-gemm", settings=dispatcher)
    for rank, values in enumerate(pool.call(run_with_faults, 2, shape, plan=plan_of(feature))):
        seen = {fault for fault, result in values.items() if not close(result, expected[rank].values)}
        idle = rank == 1 and hot > 0
        assert "" not in seen
        assert seen >= ({"weak_probability_gradient"} if idle else set(values) - {""})


PADDED = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}


@pytest.mark.long
@pytest.mark.parametrize(
    ("features", "settings", "ranks", "options", "expected"),
    [
        (("moe-alltoall-overlap",), None, 2, {}, 1),
        (("moe-alltoall-overlap",), PARTS, 2, {}, 1),
        (("moe-zero-memory",), LEVEL1, 2, {}, 1),
        (("moe-alltoall-overlap",), {"moe-alltoall-dispatcher": {"once_per_rank": True}}, 2, {}, 1),
        (("moe-allgather-overlap",), None, 2, {}, 1),
        (("moe-alltoall-overlap",), None, 2, PADDED, 0),
        (("moe-grouped-gemm", "moe-alltoall-dispatcher"), None, 1, {}, 0),
        (("moe-grouped-gemm", "moe-allgather-dispatcher"), None, 1, {}, 0),
    ],
)
def test_a_layer_reads_the_device_once(
    pool: WorkerPool, features: Any, settings: Any, ranks: int, options: Any, expected: int
) -> None:
    shape = Shape(options=options)
    for forward, backward in pool.call(reads, ranks, shape, plan=plan_of(*features, settings=settings, ep=ranks)):
        assert len(forward) == expected, forward
        assert backward == []


@pytest.mark.long
@pytest.mark.parametrize(("dispatcher", "least"), [("alltoall", 5), ("allgather", 3)])
def test_megatrons_layer_reads_the_device_more_often(pool: WorkerPool, dispatcher: str, least: int) -> None:
    plan = plan_of(settings={"expert-parallel": {"dispatcher": dispatcher}}, level=0)
    for forward, _ in pool.call(reads, 2, Shape(), plan=plan):
        assert len(forward) >= least, forward


@pytest.mark.cover(1, because="both modes take the same path, without a graph")
@pytest.mark.long
@pytest.mark.parametrize(
    ("features", "settings", "dispatcher"),
    [
        (("moe-alltoall-overlap",), PARTS, "alltoall"),
        (("moe-allgather-overlap",), None, "allgather"),
        (("moe-zero-memory",), LEVEL1, "alltoall"),
        (("moe-alltoall-overlap", "moe-adaptive-recompute"), {"moe-adaptive-recompute": {"scale": 0}}, "alltoall"),
        (("moe-alltoall-overlap",), {"moe-alltoall-dispatcher": {"once_per_rank": True}}, "alltoall"),
    ],
    ids=["parts", "all-gather", "level 1", "adaptive", "once per rank"],
)
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_a_layer_is_evaluated_as_megatrons(pool: WorkerPool, features: Any, settings: Any, dispatcher: str, mode: str) -> None:
    shape = Shape(shared=96)
    stock = plan_of(settings={"expert-parallel": {"dispatcher": dispatcher}}, level=0)
    ours = pool.call(evaluate, 2, shape, mode, plan=plan_of(*features, settings=settings))
    for (value, kept), (expected, _) in zip(ours, pool.call(evaluate, 2, shape, mode, plan=stock), strict=True):
        assert close([value], [expected])
        assert kept == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("features", "settings", "waits"),
    [
        (("moe-grouped-gemm", "moe-alltoall-dispatcher"), {}, 7),
        (("moe-grouped-gemm", "moe-allgather-dispatcher"), {}, 7),
        (("moe-alltoall-overlap",), {}, 7),
        (("moe-allgather-overlap",), {}, 7),
        (("moe-alltoall-overlap",), {"moe-alltoall-overlap": {"parts": 2}}, 13),
        (("moe-alltoall-overlap",), {"moe-alltoall-dispatcher": {"once_per_rank": True}}, 7),
        (("moe-zero-memory",), {}, 8),
        (("moe-zero-memory",), LEVEL1, 8),
    ],
    ids=["all-to-all", "all-gather", "overlapped", "gathers overlapped", "parts", "once per rank", "level 0", "level 1"],
)
def test_every_wait_is_needed(pool: WorkerPool, features: Any, settings: Any, waits: int) -> None:
    plan = plan_of(*features, settings={**settings, "device-emulation": {"poison": True}})
    for matter in pool.call(waits_that_matter, 2, Shape(shared=96), plan=plan):
        assert len(matter) == waits
        assert all(matter), matter


@pytest.mark.cover(1, because="loads and shared experts are computed apart")
@pytest.mark.long
@pytest.mark.parametrize("shared", [0, 96], ids=["routed alone", "shared experts"])
@pytest.mark.parametrize("hot", [0.0, 100.0], ids=["uneven", "a starved rank"])
def test_what_is_kept_less_has_equal_bits_with_two_micro_batches_in_flight(pool: WorkerPool, hot: float, shared: int) -> None:
    shape, e = Shape(hot=hot, shared=shared), 4
    plain = outcomes(pool, shape, "moe-alltoall-overlap")
    level0 = outcomes(pool, shape, "moe-zero-memory")
    level1 = outcomes(pool, shape, "moe-zero-memory", settings=LEVEL1)
    assert equal(plain, level0)
    assert equal(plain, level1)
    for a, b, c in zip(plain, level0, level1, strict=True):
        all_of = closed_forms.kept(a.rows, shape.hidden, shape.width, e, activation=2)
        ends = 8 * shape.experts // 2  # the ends of a rank's experts, which the products save and all else shares
        assert a.kept - b.kept == all_of - closed_forms.kept_by_level0(a.rows, shape.width, e) + ends
        assert a.kept - c.kept == all_of + ends + closed_forms.kept_by_shared(shape.tokens, shared, e, activation=1)
        again = 8 * shape.tokens * shape.topk  # the token of each row, by which backward sends rows again
        assert a.held - b.held == all_of - closed_forms.kept_by_level0(a.rows, shape.width, e) - again
        assert a.held - c.held == all_of + closed_forms.kept_by_shared(shape.tokens, shared, e, activation=1) - again


@pytest.mark.long
@pytest.mark.parametrize(("level", "repeated"), [(None, 0), ("level0", 0), ("level1", 4)])
def test_only_level1_repeats_a_product_which_is_the_first(pool: WorkerPool, level: str | None, repeated: int) -> None:
    features = ("moe-zero-memory",) if level else ("moe-alltoall-overlap",)
    plan = plan_of(*features, settings={"moe-zero-memory": {"level": level}} if level else None)
    shape = Shape()
    for rows, count in pool.call(flops, 2, shape, plan=plan):
        assert count == (18 + repeated) * rows * shape.hidden * shape.width


@pytest.mark.long
@pytest.mark.parametrize("scale", [0, 1.2, 1e9])
def test_recomputed_experts_have_equal_bits(pool: WorkerPool, scale: float) -> None:
    settings = {"moe-adaptive-recompute": {"scale": scale}}
    shape = Shape(hot=100.0)
    features = ("moe-alltoall-overlap", "moe-adaptive-recompute")
    assert equal(outcomes(pool, shape, features[0]), outcomes(pool, shape, *features, settings=settings))


@pytest.mark.long
@pytest.mark.parametrize(
    ("hot", "scale", "expected"), [(0.0, 0, [2, 2]), (100.0, 1.2, [2, 0]), (100.0, 1e9, [0, 0])], ids=["every", "hot", "none"]
)
def test_a_rank_with_too_many_rows_recomputes_alone(pool: WorkerPool, hot: float, scale: float, expected: list[int]) -> None:
    plan = plan_of("moe-alltoall-overlap", "moe-adaptive-recompute", settings={"moe-adaptive-recompute": {"scale": scale}})
    assert pool.call(fires, 2, Shape(hot=hot), plan=plan) == [(count, 2) for count in expected]


@pytest.mark.long
@pytest.mark.parametrize("feature", OVERLAPS)
@pytest.mark.parametrize("given", [{"count": 2}, {"size": 96}], ids=str)
def test_shared_experts_of_the_feature_hide_transfers(pool: WorkerPool, feature: str, given: Any) -> None:
    plan = plan_of(feature, "moe-shared-experts", settings={"moe-shared-experts": given})
    assert pool.call(shared_experts_hide_transfers, 2, Shape(), plan=plan) == [True, True]


@pytest.mark.long
@pytest.mark.parametrize(
    ("features", "shared", "settings", "most"),
    [
        (("moe-alltoall-overlap",), 96, None, 0.15),
        (("moe-alltoall-overlap",), 0, None, 0.80),
        (("moe-alltoall-overlap",), 0, PARTS, 0.40),
        (("moe-allgather-overlap",), 96, None, 0.35),
    ],
    ids=["shared experts", "none", "none, four parts", "all-gather, shared experts"],
)
def test_transfers_are_hidden(pool: WorkerPool, features: Any, shared: int, settings: Any, most: float) -> None:
    plan = plan_of(*features, settings=settings)
    for rank in pool.call(run, 2, Shape(shared=shared), plan=plan):
        assert rank.exposed <= most
    for rank in pool.call(run_eagerly, 2, Shape(shared=shared), plan=plan):
        assert rank.exposed > most


@pytest.mark.cover(1, because="the formula is of rows and ranks, and each occurs")
@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("hot", [0.0, 100.0], ids=["uneven", "starved ranks"])
def test_bytes_are_those_of_the_formula(pool: WorkerPool, hot: float, ranks: int) -> None:
    shape = Shape(hot=hot)
    for rank in outcomes(pool, shape, "moe-alltoall-overlap", ranks=ranks):
        call = choice.ExpertWork(shape.tokens, shape.topk, shape.hidden, 4, 4, shape.experts, ranks)
        expected = choice.alltoall(call, received=rank.rows)
        assert rank.sent["all_to_all"] == expected
        assert rank.sent["all_gather"] == choice.counts(call)


ONCE = {"moe-alltoall-dispatcher": {"once_per_rank": True}}


def run_counting_pairs(shape: Shape) -> tuple[Outcome, int, int]:
    return layer.run_counting_pairs(shape)


@pytest.mark.cover(1, because="the formula is of rows and ranks, and each occurs")
@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("hot", [0.0, 100.0], ids=["uneven", "starved ranks"])
def test_a_token_goes_once_to_each_rank_that_has_experts_of_it(pool: WorkerPool, hot: float, ranks: int) -> None:
    shape = Shape(hot=hot, topk=4)
    plan = plan_of("moe-alltoall-overlap", settings=ONCE, ep=ranks)
    expected = outcomes(pool, shape, "moe-alltoall-overlap", ranks=ranks)
    call = choice.ExpertWork(shape.tokens, shape.topk, shape.hidden, 4, 4, shape.experts, ranks)
    for rank, (outcome, sent, received) in enumerate(pool.call(run_counting_pairs, ranks, shape, plan=plan)):
        assert close(outcome.values, expected[rank].values)
        assert outcome.sent["all_to_all"] == closed_forms.once_per_rank(call, sent, received)
        assert outcome.sent["all_to_all"] < expected[rank].sent["all_to_all"]


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_gathered_bytes_are_those_of_the_formula(pool: WorkerPool, ranks: int) -> None:
    shape = Shape(hot=100.0)
    call = choice.ExpertWork(shape.tokens, shape.topk, shape.hidden, 4, 4, shape.experts, ranks)
    for rank in outcomes(pool, shape, "moe-allgather-overlap", ranks=ranks):
        assert (rank.sent["all_gather"], rank.sent["reduce_scatter"]) == choice.allgather(call)


@pytest.mark.long
def test_map_and_probabilities_are_a_tenth_of_megatrons(pool: WorkerPool) -> None:
    shape = Shape(experts=64, topk=4)
    gathered = {"expert-parallel": {"dispatcher": "allgather"}}
    ours = plan_of("moe-allgather-overlap", num_experts=64, router_topk=4)
    stock = plan_of(settings=gathered, level=0, num_experts=64, router_topk=4)
    tokens = 2 * 2 * shape.tokens * shape.hidden * 4  # of two ranks, and gradients of answers in backward
    chosen, every = (pool.call(run, 2, shape, plan=plan)[0].sent["all_gather"] - tokens for plan in (ours, stock))
    assert 0 < chosen <= every / 10
